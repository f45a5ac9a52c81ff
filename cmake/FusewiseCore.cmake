# The core: no torch, no Python. `fusewise_cpu` has the CPU half alone (what a torch without CUDA
# loads); `fusewise` is the whole, with CUDA where it is built.

find_package(Threads REQUIRED)

# A new file needs no line here.
file(GLOB common_sources CONFIGURE_DEPENDS src/common/*.cpp)
list(FILTER common_sources EXCLUDE REGEX no_cuda)
file(GLOB cpu_sources CONFIGURE_DEPENDS src/cpu/*.cpp)
set(kernel_sources ${cpu_sources})
list(FILTER cpu_sources EXCLUDE REGEX _kernels)
list(FILTER kernel_sources INCLUDE REGEX _kernels)

# The CPU kernels, the same source once for each instruction set; the choice is made at run time.
# -ffp-contract=off: fused multiply-adds are written where they are meant, see multiply_add.
# -mno-mmx: GCC 12 moves a double through an MMX register now and then, and without EMMS behind it the
# next x87 instruction of anybody, the norms of numpy's OpenBLAS for one, gives NaN.
set(isa_flags_portable "")
set(isa_flags_avx2 -mavx2 -mfma -mf16c)
set(isa_flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c
  -mprefer-vector-width=512)
set(isa_objects "")
foreach(isa portable avx2 avx512)
  add_library(fusewise_${isa} OBJECT ${kernel_sources})
  target_compile_definitions(fusewise_${isa} PRIVATE FUSEWISE_ISA=${isa})
  target_compile_options(fusewise_${isa} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O3> -ffp-contract=off -mno-mmx
    ${isa_flags_${isa}})
  target_include_directories(fusewise_${isa} PRIVATE include src)
  target_link_libraries(fusewise_${isa} PRIVATE fusewise_options)
  list(APPEND isa_objects $<TARGET_OBJECTS:fusewise_${isa}>)
endforeach()

# Everything else that both libraries share, compiled once.
add_library(fusewise_base OBJECT ${common_sources} ${cpu_sources})
target_include_directories(fusewise_base PRIVATE include src)
target_link_libraries(fusewise_base PRIVATE fusewise_options)
if(FUSEWISE_WITH_BLAS)
  target_compile_definitions(fusewise_base PRIVATE FUSEWISE_BLAS)
  target_include_directories(fusewise_base PRIVATE ${FUSEWISE_CBLAS_INCLUDE})
endif()

function(fusewise_core_target name)
  target_sources(${name} PRIVATE $<TARGET_OBJECTS:fusewise_base> ${isa_objects})
  target_include_directories(${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:fusewise_options> PUBLIC Threads::Threads)
endfunction()

add_library(fusewise_cpu STATIC EXCLUDE_FROM_ALL src/common/no_cuda.cpp)
fusewise_core_target(fusewise_cpu)

add_library(fusewise STATIC)
add_library(fusewise::fusewise ALIAS fusewise)
fusewise_core_target(fusewise)
if(FUSEWISE_WITH_BLAS)
  target_link_libraries(fusewise PRIVATE ${BLAS_LIBRARIES})
endif()
if(FUSEWISE_WITH_CUDA)
  file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS src/cuda/*.cu src/cuda/*.cpp)
  set(sm90a_sources ${cuda_sources})
  list(FILTER cuda_sources EXCLUDE REGEX backward_wgmma)
  list(FILTER sm90a_sources INCLUDE REGEX backward_wgmma)
  set_source_files_properties(src/cuda/device.cu PROPERTIES
    COMPILE_DEFINITIONS FUSEWISE_CUDA_ARCHITECTURES="${FUSEWISE_ARCHITECTURES}")
  if(FUSEWISE_CUDNN_INCLUDE)
    set_source_files_properties(src/cuda/conv/convolution.cpp src/cuda/conv/cudnn.cpp PROPERTIES
      COMPILE_DEFINITIONS FUSEWISE_WITH_CUDNN COMPILE_OPTIONS "-isystem;${FUSEWISE_CUDNN_INCLUDE}")
  endif()
  set(cuda_options -Xcompiler=-Wall --expt-relaxed-constexpr)
  # Warpgroups' products are of sm_90a alone; no other GPU runs these kernels.
  add_library(fusewise_sm90a OBJECT ${sm90a_sources})
  set_target_properties(fusewise_sm90a PROPERTIES
    CUDA_ARCHITECTURES 90a-real JOB_POOL_COMPILE nvcc)
  target_include_directories(fusewise_sm90a PRIVATE include src)
  target_compile_options(fusewise_sm90a PRIVATE ${cuda_options})
  target_link_libraries(fusewise_sm90a PRIVATE fusewise_options CUDA::cudart_static)
  target_sources(fusewise PRIVATE ${cuda_sources} $<TARGET_OBJECTS:fusewise_sm90a>)
  target_compile_options(fusewise PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
  target_link_libraries(fusewise PUBLIC CUDA::cudart_static CUDA::cublasLt)
  set_target_properties(fusewise PROPERTIES JOB_POOL_COMPILE nvcc)
else()
  target_sources(fusewise PRIVATE src/common/no_cuda.cpp)
endif()
