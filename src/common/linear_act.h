#pragma once

#include "common/matrix.h"
#include "common/operator.h"
#include "common/scratch.h"
#include "fusewise/linear_act.h"

namespace fusewise {

extern const Operator<LinearActForward, LinearActBackward> kLinearAct;

/// dz = dy * act' in a form that GEMMs can read, with contiguous rows or columns.
class Dz {
 public:
  Dz(const Context& context, const LinearActBackward& call)
      : is_read_(call.dx.defined() || call.dw.defined()),
        is_dy_(call.activation == Activation::identity && is_matrix(call.dy)),
        in_place_(call.overwrite_dy && has_adjacent_rows(call.dy)),
        memory_(context,
                is_read_ && !is_dy_ && !in_place_ ? call.dy.numel() * size_of(call.dy.dtype) : 0),
        view_(call.dy) {
    if (!is_dy_ && !in_place_) {
      view_ = TensorView(memory_.data(), call.dy.dtype, call.dy.device,
                         {call.dy.sizes[0], call.dy.sizes[1]});
    }
  }
  const TensorView& view() const { return view_; }
  /// Where dz must be written before it is read. Absent if dz is not needed or is dy itself.
  TensorView output() const { return is_read_ && !is_dy_ ? view_ : TensorView(); }

 private:
  bool is_read_, is_dy_, in_place_;
  Scratch<char> memory_;
  TensorView view_;
};

}  // namespace fusewise
