# `cmake --install`: headers, library, and the files that find_package(fusewise) reads.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS fusewise EXPORT fusewise-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/fusewise DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fusewise-targets NAMESPACE fusewise::
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fusewise)
configure_package_config_file(cmake/fusewise-config.cmake.in fusewise-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fusewise)
write_basic_package_version_file(fusewise-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fusewise-config.cmake
  ${PROJECT_BINARY_DIR}/fusewise-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fusewise)
