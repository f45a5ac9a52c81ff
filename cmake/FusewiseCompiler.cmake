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

add_library(fusewise_options INTERFACE)
target_compile_options(fusewise_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror=return-type>
  $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>
  $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_BINARY_DIR}/=>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${PROJECT_BINARY_DIR}/=>)
if(FUSEWISE_SANITIZE)
  target_compile_options(fusewise_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FUSEWISE_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer -g>)
  target_link_options(fusewise_options INTERFACE -fsanitize=${FUSEWISE_SANITIZE})
endif()
