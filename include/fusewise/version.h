#pragma once

/// The version of these headers; CMake and the Python package read it from here.
#define FUSEWISE_VERSION "0.1.0"
