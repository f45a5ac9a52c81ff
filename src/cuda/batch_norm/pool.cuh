#pragma once

#include <string>

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

std::string pool_channels_last_declines(const Context& context,
                                        const BatchNormActPoolForward& call);
std::string pool_channels_last_declines(const Context& context,
                                        const BatchNormActPoolBackward& call);
void pool_channels_last_run(const Context& context, const BatchNormActPoolForward& call);
void pool_channels_last_run(const Context& context, const BatchNormActPoolBackward& call);

void pool_general_run(const Context& context, const BatchNormActPoolForward& call);
void pool_general_run(const Context& context, const BatchNormActPoolBackward& call);

}  // namespace fusewise::cuda
