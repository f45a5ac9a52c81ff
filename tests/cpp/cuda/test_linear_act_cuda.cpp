// Linear + activation and stacks of it on the GPU, every implementation against plain loops in
// float64. Tests named Short* are small enough for compute-sanitizer and reach every kernel of ours
// between them.

#include <set>

#include "fusewise/mlp.h"
#include "gpu.h"
#include "linear_reference.h"

namespace fusewise::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

class CudaLinearAct : public NeedsGpu {};

// Tensors on the GPU. ----------------------------------------------------------------------------

using Tensors = TensorsOnGpu<LinearAct>::Members;

const Tensors kAll = {&LinearAct::x,  &LinearAct::w,    &LinearAct::b,
                      &LinearAct::y,  &LinearAct::kept, &LinearAct::dy,
                      &LinearAct::dx, &LinearAct::dw,   &LinearAct::db};
const Tensors kForwardOutputs = {&LinearAct::y, &LinearAct::kept};
const Tensors kBackwardOutputs = {&LinearAct::dx, &LinearAct::dw, &LinearAct::db};

class OnGpu : public TensorsOnGpu<LinearAct> {
 public:
  OnGpu(LinearAct& host, const Tensors& outputs) : TensorsOnGpu(host, kAll, outputs) {}

  LinearActForward forward() const {
    LinearActForward call = host_.forward();
    for (TensorView* view : {&call.x, &call.w, &call.b, &call.y, &call.kept}) move(*view);
    return call;
  }
  LinearActBackward backward() const {
    LinearActBackward call = host_.backward();
    for (TensorView* view :
         {&call.dy, &call.x, &call.w, &call.kept, &call.dx, &call.dw, &call.db}) {
      move(*view);
    }
    return call;
  }
};

// Running and comparing. -------------------------------------------------------------------------

using Names = std::set<std::string>;

/// Those that take a call when they are forced to.
template <typename Call>
Names able(const Call& call) {
  Names names;
  for (const Candidate& candidate : explain(on_gpu(), call)) {
    if (candidate.able) names.insert(candidate.name);
  }
  return names;
}

/// Whether algorithms are measured on first use: slow under a sanitizer, and nothing of ours runs.
enum class Tuning { off, on };

template <typename Call>
Call forced(Call call, const std::string& name, Tuning tuning) {
  call.implementation = name;
  call.math.tune = tuning == Tuning::on;
  return call;
}

Names expect_forwards(LinearAct call, Tuning tuning) {
  const Values z = z_reference(call);
  LinearAct probe = call;
  OnGpu probed(probe, kForwardOutputs);
  LinearActForward asked = probed.forward();
  asked.math.tune = false;
  const Names names = able(asked);
  for (const std::string& name : names) {
    SCOPED_TRACE("forward " + name);
    LinearAct mine = call;
    OnGpu gpu(mine, kForwardOutputs);
    const LinearActForward arguments = forced(gpu.forward(), name, tuning);
    linear_act(on_gpu(), arguments);
    gpu.fetch(kForwardOutputs);
    expect_forward_results(mine, z);
  }
  EXPECT_TRUE(names.contains("pass"));
  return names;
}

void expect_backwards(LinearAct call, Tuning tuning) {
  keep(call);
  const LinearGradients expected = gradient_reference(call);
  LinearAct probe = call;
  LinearActBackward asked = OnGpu(probe, {}).backward();
  asked.math.tune = false;
  for (const std::string& name : able(asked)) {
    SCOPED_TRACE("backward " + name);
    LinearAct mine = call;
    OnGpu gpu(mine, kBackwardOutputs);
    const LinearActBackward arguments = forced(gpu.backward(), name, tuning);
    linear_act(on_gpu(), arguments);
    gpu.fetch(kBackwardOutputs);
    expect_backward_results(mine, expected);
  }
}

/// Both ways, with every implementation that takes the call; those of forward.
Names expect_both(const LinearAct& call, Tuning tuning = Tuning::off) {
  const Names names = expect_forwards(call, tuning);
  expect_backwards(call, tuning);
  return names;
}

// Short tests. -----------------------------------------------------------------------------------

TEST_F(CudaLinearAct, ShortEveryTypeAndActivation) {
  Names seen;
  for (const DType dtype : kFloating) {
    for (const Activation activation : kActivations) {
      for (const MatrixSizes& sizes : {MatrixSizes{37, 24, 16}, {3, 65, 7}}) {
        SCOPED_TRACE(case_name(sizes, dtype, activation, Form::dense, Form::dense, Form::dense));
        seen.merge(expect_both(make_linear_act(sizes, dtype, activation)));
      }
    }
  }
  EXPECT_EQ(seen, (Names{"epilogue", "pass"}));
}

TEST_F(CudaLinearAct, ShortFormsOfTheGradient) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const Form form : kForms) {
      for (const Activation activation :
           {Activation::identity, Activation::relu, Activation::gelu}) {
        const MatrixSizes sizes{21, 19, 8};
        SCOPED_TRACE(case_name(sizes, dtype, activation, Form::dense, Form::dense, form));
        expect_backwards(make_linear_act(sizes, dtype, activation, Form::dense, Form::dense, form),
                         Tuning::off);
      }
    }
  }
}

TEST_F(CudaLinearAct, ShortOutputsInForms) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const Form form : kRows) {
      for (const Activation activation : kActivations) {
        LinearAct call = make_linear_act({9, 43, 7}, dtype, activation);
        call.y = matrix(dtype, form, 9, 43);
        if (call.kept.defined()) {
          const bool bits = activation == Activation::relu;
          call.kept = matrix(bits ? DType::u8 : dtype, form, 9, bits ? bit_bytes(43) : 43);
        }
        expect_both(call);
      }
    }
  }
}

TEST_F(CudaLinearAct, ShortReluToldByItsOutput) {
  for (const DType dtype : kFloating) {
    LinearAct call = make_linear_act({33, 43, 7}, dtype, Activation::relu);
    call.kept = Tensor(dtype, {33, 43});
    expect_backwards(call, Tuning::off);
  }
}

TEST_F(CudaLinearAct, ShortManyRowsForTheBiasGradient) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const MatrixSizes& sizes : {MatrixSizes{1500, 9, 2}, {700, 264, 1}}) {
      LinearAct call = make_linear_act(sizes, dtype, Activation::silu);
      call.dx = call.dw = {};
      expect_backwards(call, Tuning::off);
    }
  }
}

// The rest. --------------------------------------------------------------------------------------

TEST_F(CudaLinearAct, EveryTypeAndForm) {
  const MatrixSizes sizes{11, 24, 21};
  for (const DType dtype : kFloating) {
    for (const Form x : kOperands) {
      for (const Form w : kOperands) {
        const Activation activation = x == w ? Activation::relu : Activation::gelu_tanh;
        SCOPED_TRACE(case_name(sizes, dtype, activation, x, w, Form::dense));
        expect_both(make_linear_act(sizes, dtype, activation, x, w));
      }
    }
  }
}

TEST_F(CudaLinearAct, EverySizeMeasuredAndNot) {
  const MatrixSizes all[] = {{1, 1, 1},     {3, 65, 3},    {65, 3, 129},   {129, 8, 1},
                             {70, 129, 65}, {256, 96, 64}, {300, 40, 128}, {17, 1024, 9}};
  for (const DType dtype : kFloating) {
    for (const MatrixSizes& sizes : all) {
      for (const Tuning tuning : {Tuning::off, Tuning::on}) {
        SCOPED_TRACE(
            case_name(sizes, dtype, Activation::relu, Form::dense, Form::dense, Form::dense));
        expect_both(make_linear_act(sizes, dtype, Activation::relu), tuning);
      }
    }
  }
}

TEST_F(CudaLinearAct, NothingToDo) {
  for (const MatrixSizes& sizes : {MatrixSizes{0, 5, 4}, {3, 0, 4}, {3, 5, 0}, {0, 0, 0}}) {
    for (const Activation activation : kActivations) {
      for (const Tuning tuning : {Tuning::off, Tuning::on}) {
        SCOPED_TRACE(
            case_name(sizes, DType::f32, activation, Form::dense, Form::dense, Form::dense));
        expect_both(make_linear_act(sizes, DType::f32, activation), tuning);
      }
    }
  }
}

TEST_F(CudaLinearAct, WithoutBiasAndWithNothingKept) {
  for (const DType dtype : kFloating) {
    for (const Activation activation : kActivations) {
      LinearAct call = make_linear_act({9, 24, 16}, dtype, activation);
      call.b = {};
      expect_forwards(call, Tuning::off);
      call.kept = {};
      const Names names = expect_forwards(call, Tuning::off);
      if (activation == Activation::gelu_tanh && dtype != DType::bf16) {
        EXPECT_FALSE(names.contains("epilogue"));
      }
    }
  }
}

TEST_F(CudaLinearAct, EveryChoiceOfGradients) {
  for (const Activation activation : kActivations) {
    for (const Form dy : {Form::dense, Form::stepped}) {
      for (int wanted = 0; wanted < 8; ++wanted) {
        SCOPED_TRACE(wanted);
        LinearAct call =
            make_linear_act({70, 24, 8}, DType::f16, activation, Form::dense, Form::dense, dy);
        if (!(wanted & 1)) call.dx = {};
        if (!(wanted & 2)) call.dw = {};
        if (!(wanted & 4)) call.db = {};
        expect_backwards(call, Tuning::off);
      }
    }
  }
}

TEST_F(CudaLinearAct, GradientInPlace) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const Activation activation : kActivations) {
      LinearAct call = make_linear_act({33, 43, 8}, dtype, activation);
      keep(call);
      const LinearGradients expected = gradient_reference(call);
      Tensors outputs = kBackwardOutputs;
      OnGpu gpu(call, outputs);
      LinearActBackward arguments = gpu.backward();
      arguments.overwrite_dy = true;
      arguments.math.tune = false;
      linear_act(on_gpu(), arguments);
      outputs.push_back(&LinearAct::dy);
      gpu.fetch(outputs);
      EXPECT_TRUE(all_close(call.dy, expected.dz)) << name_of(activation);
      expect_backward_results(call, expected);
    }
  }
}

TEST_F(CudaLinearAct, NaNInfinityAndZero) {
  for (const DType dtype : kFloating) {
    for (const Activation activation : kActivations) {
      for (const double value : {kNaN, kInf, -kInf, 0.0, -0.0}) {
        SCOPED_TRACE(std::string(name_of(activation)) + " " + std::to_string(value));
        LinearAct row = make_linear_act({5, 24, 1}, dtype, activation);  // of such a z
        row.x.set(1, value);
        for (Index i = 0; i < 24; ++i) row.w.set(i, 1);
        expect_forwards(row, Tuning::off);
        LinearAct call = make_linear_act({5, 24, 8}, dtype, activation);
        call.b.set(3, value);
        expect_forwards(call, Tuning::off);
        call = make_linear_act({5, 24, 8}, dtype, activation);
        call.dy.set(40, value);
        expect_backwards(call, Tuning::off);
      }
    }
  }
}

TEST_F(CudaLinearAct, TheSameBitsAgain) {
  for (const MatrixSizes& sizes : {MatrixSizes{333, 72, 40}, {2000, 264, 16}, {64, 64, 4000}}) {
    for (const Activation activation : {Activation::relu, Activation::gelu}) {
      std::vector<std::uint8_t> first;
      for (int repeat = 0; repeat < 4; ++repeat) {
        LinearAct call = make_linear_act(sizes, DType::f16, activation);
        Tensors outputs = kForwardOutputs;
        outputs.insert(outputs.end(), kBackwardOutputs.begin(), kBackwardOutputs.end());
        OnGpu gpu(call, outputs);
        linear_act(on_gpu(), gpu.forward());
        linear_act(on_gpu(), gpu.backward());
        gpu.fetch(outputs);
        std::vector<std::uint8_t> bytes;
        for (const auto member : outputs) {
          const auto& memory = (call.*member).memory();
          bytes.insert(bytes.end(), memory.begin(), memory.end());
        }
        if (repeat == 0) first = bytes;
        EXPECT_TRUE(bytes == first) << repeat;
      }
    }
  }
}

TEST_F(CudaLinearAct, CapturedIntoAGraph) {
  // First use inside the capture: nothing may be measured there.
  LinearAct call = make_linear_act({123, 88, 56}, DType::f16, Activation::relu);
  const Values z = z_reference(call);
  OnGpu gpu(call, kForwardOutputs);
  cudaStream_t stream{};
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph{};
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  linear_act(on_gpu(stream), gpu.forward());
  check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable{};
  check(cudaGraphInstantiate(&executable, graph, 0));
  check(cudaGraphLaunch(executable, stream));
  check(cudaStreamSynchronize(stream));
  gpu.fetch(kForwardOutputs);
  expect_forward_results(call, z);
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
}

// Stacks. ----------------------------------------------------------------------------------------

/// A stack of two against its layers one by one, byte for byte.
TEST_F(CudaLinearAct, ShortStackIsItsLayers) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const Activation activation : kActivations) {
      SCOPED_TRACE(name_of(activation));
      LinearAct first = make_linear_act({21, 24, 16}, dtype, activation);
      LinearAct second = make_linear_act({21, 9, 24}, dtype, Activation::identity);
      const bool relu = activation == Activation::relu;
      if (relu) first.kept = {};
      ProductMath math;
      math.tune = false;

      LinearAct below = first, above = second;
      OnGpu low(below,
                {&LinearAct::y, &LinearAct::kept, &LinearAct::dx, &LinearAct::dw, &LinearAct::db});
      OnGpu high(above, {&LinearAct::y, &LinearAct::dw, &LinearAct::db});
      const MlpLayer layers[] = {
          {low.view(&LinearAct::w), low.view(&LinearAct::b), low.view(&LinearAct::y),
           low.view(&LinearAct::kept), low.view(&LinearAct::dw), low.view(&LinearAct::db)},
          {high.view(&LinearAct::w), high.view(&LinearAct::b), high.view(&LinearAct::y),
           high.view(&LinearAct::kept), high.view(&LinearAct::dw), high.view(&LinearAct::db)}};
      MlpForward forward;
      forward.x = low.view(&LinearAct::x), forward.layers = layers, forward.math = math;
      forward.activation = activation;
      mlp(on_gpu(), forward);
      MlpBackward backward;
      backward.dy = high.view(&LinearAct::dy), backward.x = forward.x, backward.layers = layers;
      backward.activation = activation, backward.math = math;
      backward.dx = low.view(&LinearAct::dx);
      mlp(on_gpu(), backward);
      low.fetch({&LinearAct::y, &LinearAct::kept, &LinearAct::dx, &LinearAct::dw, &LinearAct::db});
      high.fetch({&LinearAct::y, &LinearAct::dw, &LinearAct::db});

      expect_forward_results(below, z_reference(below));
      above.x = below.y;
      expect_forward_results(above, z_reference(above));
      const LinearGradients upper = gradient_reference(above);
      EXPECT_TRUE(all_close(above.dw, upper.dw));
      EXPECT_TRUE(all_close(above.db, upper.db));
      // The lower layer from the reference's gradient, which is the stack's up to its rounding.
      LinearAct lower = below;
      if (relu) lower.kept = below.y;
      const LinearGradients right = gradient_reference(lower, stored(upper.dx, dtype));
      EXPECT_TRUE(all_close(below.dx, right.dx));
      EXPECT_TRUE(all_close(below.dw, right.dw));
      EXPECT_TRUE(all_close(below.db, right.db));
    }
  }
}

// Errors. ----------------------------------------------------------------------------------------

TEST_F(CudaLinearAct, BadArgumentsAreNamed) {
  LinearAct call = make_linear_act({4, 6, 5}, DType::f32, Activation::relu);
  OnGpu gpu(call, {});
  const auto message = [](const auto& arguments) -> std::string {
    try {
      linear_act(on_gpu(), arguments);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  LinearActForward bad = gpu.forward();
  bad.w.device = {};
  EXPECT_EQ(message(bad), "w: expected a tensor on cuda:0, got one on cpu");
  bad = gpu.forward();
  bad.x.strides = {10, 2};
  EXPECT_EQ(message(bad), "x: expected contiguous rows or columns, got strides [10, 2]");
  bad = gpu.forward();
  bad.activation = Activation::gelu;
  EXPECT_EQ(message(bad).substr(0, 5), "kept:");
  LinearActBackward wrong = gpu.backward();
  wrong.db.sizes[0] = 7;
  EXPECT_EQ(message(wrong).substr(0, 3), "db:");
}

TEST_F(CudaLinearAct, WhoIsForcedAndDeclinesSaysWhy) {
  LinearAct call = make_linear_act({4, 6, 5}, DType::f32, Activation::silu);
  OnGpu gpu(call, {});
  try {
    linear_act(on_gpu(), forced(gpu.forward(), "epilogue", Tuning::off));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no epilogue for this activation"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace fusewise::testing
