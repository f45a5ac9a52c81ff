# Decides whether the CUDA part is built, and for which GPUs. Sets FUSEWISE_WITH_CUDA.

set(FUSEWISE_WITH_CUDA OFF)
if(NOT FUSEWISE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FUSEWISE_CUDA is '${FUSEWISE_CUDA}'; it takes AUTO, ON or OFF.")
endif()
if(FUSEWISE_CUDA STREQUAL "OFF")
  message(STATUS "Fusewise: CPU only, as FUSEWISE_CUDA=OFF asks.")
  return()
endif()

include(CheckLanguage)
# Without a GPU, sm_90 alone: two cores build it in minutes. The preset `release` names them all.
# The newest one also as PTX, which newer GPUs translate for themselves.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  find_program(NVIDIA_SMI nvidia-smi)
  set(found "")
  if(NVIDIA_SMI)
    execute_process(COMMAND ${NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE found ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  if(found MATCHES "^[0-9]")
    string(REGEX REPLACE "[.\r]" "" found "${found}")
    string(REPLACE "\n" ";" found "${found}")
    list(REMOVE_DUPLICATES found)
    list(SORT found COMPARE NATURAL)
  else()
    set(found 90)
  endif()
  list(GET found -1 newest)
  list(TRANSFORM found APPEND "-real")
  set(CMAKE_CUDA_ARCHITECTURES "${found};${newest}-virtual" CACHE STRING "GPU architectures")
endif()

if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # an nvcc that came since the last time is found
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(FUSEWISE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FUSEWISE_CUDA=ON, but no nvcc was found. Put the CUDA 13 toolkit's bin "
      "folder on PATH, or build with FUSEWISE_CUDA=OFF for the CPU alone.")
  endif()
  message(STATUS "Fusewise: CPU only (no nvcc on PATH).")
  return()
endif()
if(CMAKE_VERSION VERSION_LESS 3.30)
  if(FUSEWISE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FUSEWISE_CUDA=ON needs CMake 3.30 or newer, this is ${CMAKE_VERSION}. "
      "`make setup` puts one into .venv/bin; FUSEWISE_CUDA=OFF builds for the CPU alone.")
  endif()
  message(STATUS "Fusewise: CPU only (CUDA needs CMake 3.30, this is ${CMAKE_VERSION}).")
  return()
endif()

enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
if(CUDAToolkit_VERSION VERSION_LESS 13)
  if(FUSEWISE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FUSEWISE_CUDA=ON, but nvcc is of CUDA ${CUDAToolkit_VERSION} and the "
      "kernels need CUDA 13, as torch 2.11 does. Put a newer one on PATH, or build with "
      "FUSEWISE_CUDA=OFF for the CPU alone.")
  endif()
  message(STATUS "Fusewise: CPU only (nvcc is of CUDA ${CUDAToolkit_VERSION}, 13 is needed).")
  return()
endif()
set(FUSEWISE_WITH_CUDA ON)
list(JOIN CMAKE_CUDA_ARCHITECTURES " " FUSEWISE_ARCHITECTURES)  # for messages
message(STATUS "Fusewise: CUDA ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}.")
