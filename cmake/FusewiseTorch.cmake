# The PyTorch operators, on torch's stable ABI: one library for the CPU and one for CUDA, both
# loadable under every torch from 2.11 on. Needs torch's headers and two of its libraries to link
# against; find_package(Torch) is not used, as it drags in the whole CUDA toolkit.

find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_dir)
  message(FATAL_ERROR "FUSEWISE_TORCH=ON, but ${Python_EXECUTABLE} has no torch. "
    "`make setup` installs it into .venv.")
endif()

if(SKBUILD)
  set(library_dir fusewise/_lib)
else()
  set(library_dir ${PROJECT_SOURCE_DIR}/python/fusewise/_lib)
endif()

function(fusewise_use_torch name)
  target_compile_definitions(${name} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000ULL)
  target_include_directories(${name} SYSTEM PRIVATE ${torch_dir}/include)
  target_link_libraries(${name} PRIVATE ${torch_dir}/lib/libtorch_cpu.so)
  # torch is always loaded first, so its libraries are found by name; a path would be a private one.
  set_target_properties(${name} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
  target_compile_options(${name} PRIVATE -ffile-prefix-map=${torch_dir}/=)
endfunction()

function(fusewise_torch_library name core)
  add_library(${name} MODULE ${ARGN}
    bindings/torch/build_info.cpp
    bindings/torch/call.cpp
    bindings/torch/convolution.cpp
    bindings/torch/failure.cpp
    bindings/torch/li_block.cpp
    bindings/torch/li_conv.cpp
    bindings/torch/li_layer.cpp
    bindings/torch/mlp.cpp
    bindings/torch/operators.cpp)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE ${core} fusewise_options)
  fusewise_use_torch(${name})
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${library_dir})
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL -Wl,--as-needed)
  install(TARGETS ${name} LIBRARY DESTINATION fusewise/_lib)
endfunction()

fusewise_torch_library(fusewise_torch fusewise_cpu
  bindings/torch/context_cpu.cpp bindings/torch/schemas.cpp)
target_compile_definitions(fusewise_torch PRIVATE FUSEWISE_DEVICE=CPU)

if(FUSEWISE_WITH_CUDA AND EXISTS ${torch_dir}/lib/libtorch_cuda.so)
  fusewise_torch_library(fusewise_torch_cuda fusewise bindings/torch/context_cuda.cpp)
  target_compile_definitions(fusewise_torch_cuda PRIVATE FUSEWISE_DEVICE=CUDA USE_CUDA
    FUSEWISE_CUDA_VERSION="${CUDAToolkit_VERSION}"
    FUSEWISE_CUDA_ARCHITECTURES="${FUSEWISE_ARCHITECTURES}")
  target_link_libraries(fusewise_torch_cuda PRIVATE ${torch_dir}/lib/libtorch_cuda.so)
else()
  if(FUSEWISE_WITH_CUDA)
    message(STATUS "Fusewise: no CUDA operators, this torch has no CUDA.")
  endif()
  # What an earlier build left would be loaded beside the new CPU library.
  file(REMOVE ${library_dir}/libfusewise_torch_cuda.so ${library_dir}/libfusewise_naive.so)
endif()

# For the benchmark and the lessons: cases, the naive kernels that they show as baselines, a copy.
install(DIRECTORY benchmarks/cases DESTINATION fusewise/bench)

function(fusewise_naive_library name)
  add_library(${name} MODULE ${ARGN})
  target_link_libraries(${name} PRIVATE fusewise_options)
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${library_dir})
  install(TARGETS ${name} LIBRARY DESTINATION fusewise/_lib)
endfunction()

fusewise_naive_library(fusewise_naive_cpu
  benchmarks/naive/linear.cpp benchmarks/naive/copy.cpp benchmarks/naive/empty.cpp)
fusewise_use_torch(fusewise_naive_cpu)
if(FUSEWISE_WITH_CUDA)
  fusewise_naive_library(fusewise_naive
    benchmarks/naive/linear.cu benchmarks/naive/squeeze_excite.cu)
  target_link_libraries(fusewise_naive PRIVATE CUDA::cudart_static)
endif()
