# Looks for cuDNN's headers: those of torch's own package, or the system's. The library is loaded at
# run time. Sets FUSEWISE_CUDNN_INCLUDE, where they are found.

if(FUSEWISE_WITH_CUDA)
  set(hints "")
  if(FUSEWISE_TORCH)
    find_package(Python QUIET COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(p + '/cudnn/include' for p in (s.submodule_search_locations if s else [])))"
      OUTPUT_VARIABLE hints OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  find_path(FUSEWISE_CUDNN_INCLUDE cudnn_graph.h
    HINTS ${hints} PATHS ${CUDAToolkit_INCLUDE_DIRS} DOC "cuDNN's headers")
  if(FUSEWISE_CUDNN_INCLUDE)
    message(STATUS "Fusewise: convolutions by cuDNN.")
  else()
    message(STATUS "Fusewise: convolutions by torch; cuDNN's headers were not found "
      "(set FUSEWISE_CUDNN_INCLUDE).")
  endif()
endif()
