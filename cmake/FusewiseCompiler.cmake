# How everything is compiled: C++20, warnings, no paths of the build machine in the binaries.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

# nvcc needs about 1 GB a job; no more of them than cores.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
set_property(GLOBAL PROPERTY JOB_POOLS nvcc=${cores})

# No flag names the build folder: ccache then knows a file again that another build compiled.
add_library(fusewise_options INTERFACE)
target_compile_options(fusewise_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror=return-type>
  $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>)
if(FUSEWISE_SANITIZE)
  # -O1 -g1 compiles three times as fast as -O3 -g and is enough for a readable stack trace.
  target_compile_options(fusewise_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FUSEWISE_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer -O1 -g1>)
  target_link_options(fusewise_options INTERFACE -fsanitize=${FUSEWISE_SANITIZE})
endif()
