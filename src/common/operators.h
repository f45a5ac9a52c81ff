#pragma once

// Every operator of the library, once. From this list come the declarations below, their stand-ins
// in a build without CUDA, torch's operators and the names in Python's `fusewise.implementation`.

#include "common/operator.h"
#include "fusewise/autoencoder.h"
#include "fusewise/linear_act.h"
#include "fusewise/squeeze_excite.h"

/// each(foo, Foo): its structs are FooForward and FooBackward, its description is kFoo, and each
/// backend has the lists foo_forward() and foo_backward().
#define FUSEWISE_EACH_OPERATOR(each) \
  each(autoencoder, Autoencoder);    \
  each(linear_act, LinearAct);       \
  each(squeeze_excite, SqueezeExcite);

namespace fusewise {

#define FUSEWISE_DECLARE(name, Name) extern const Operator<Name##Forward, Name##Backward> k##Name
FUSEWISE_EACH_OPERATOR(FUSEWISE_DECLARE)
#undef FUSEWISE_DECLARE

#define FUSEWISE_DECLARE(name, Name)               \
  Implementations<Name##Forward> name##_forward(); \
  Implementations<Name##Backward> name##_backward()

namespace cpu {
FUSEWISE_EACH_OPERATOR(FUSEWISE_DECLARE)
}
/// Defined in src/cuda, or, in a build without CUDA, in no_cuda.cpp.
namespace cuda {
FUSEWISE_EACH_OPERATOR(FUSEWISE_DECLARE)
}
#undef FUSEWISE_DECLARE

}  // namespace fusewise
