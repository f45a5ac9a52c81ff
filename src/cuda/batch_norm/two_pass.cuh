#pragma once

#include <string>

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

std::string two_pass_declines(const Context& context, const BatchNormActForward& call);
std::string two_pass_declines(const Context& context, const BatchNormActBackward& call);
std::string two_pass_declines(const Context& context, const BatchNormStatistics& call);
void two_pass_run(const Context& context, const BatchNormActForward& call);
void two_pass_run(const Context& context, const BatchNormActBackward& call);
void two_pass_run(const Context& context, const BatchNormStatistics& call);

}  // namespace fusewise::cuda
