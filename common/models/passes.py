"""What a loss whose derivative is known needs of a network: its output, and the gradients that a gradient of that output makes.

`Recorded` has autograd record any module. `Written` is for a perceptron, whose backward pass is short: with layers as small
as a controller's, keeping the record takes as long as the arithmetic (benchmarks/results/td3.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.arithmetic import autocast
from common.models.flat import Flat
from common.models.snapshot import Precision

Tape: TypeAlias = Any
"""What a forward pass leaves for the backward passes; of use to the object alone that made it."""
_LAYER_NORM_EPS = 1e-5  # torch's


class Prepared(Protocol):
    """Inputs of N rows in the form that passes take them; those of networks of one architecture are alike."""

    def __getitem__(self, rows: slice) -> Self:
        """Some of the rows."""


class Passes(Protocol):
    """The passes through one network. `renew` aside, they may be made by two threads at once."""

    def prepare(self, *inputs: Tensor) -> Any:
        """`Prepared` inputs [N, ...], in the order of the module's `forward`."""

    def evaluate(self, inputs: Any) -> Tensor:
        """The output alone, float32."""

    def forward(self, inputs: Any) -> tuple[Tensor, Tape]:
        """The output, float32, and what `gradients` and `input_gradient` need."""

    def gradients(self, tape: Tape, output_gradient: Tensor, *, into: Flat) -> None:
        """Of the weights, float32, given the loss's by the output; what `into` held is overwritten."""

    def input_gradient(self, tape: Tape, output_gradient: Tensor) -> Tensor:
        """Of the last input [N, F], which must be of floats; float32."""

    def renew(self) -> None:
        """Take note of parameters that were changed."""


class _Inputs(tuple[Tensor, ...]):
    """`Prepared` by doing nothing."""

    __slots__ = ()

    def __getitem__(self, rows: slice) -> Self:  # type: ignore[override]
        return type(self)(tensor[rows] for tensor in self)


class Recorded:
    """`Passes` of any module, by autograd."""

    def __init__(self, net: nn.Module, *, precision: Precision) -> None:
        """Arithmetic in `precision`; the parameters are float32, and gradients those of the trained ones."""
        self._net, self._precision = net, precision
        self._trained = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def prepare(self, *inputs: Tensor) -> _Inputs:
        """See `Passes`."""
        return _Inputs(inputs)

    @torch.no_grad()
    def evaluate(self, inputs: _Inputs) -> Tensor:
        """See `Passes`."""
        return self._output(*inputs)

    @torch.enable_grad()
    def forward(self, inputs: _Inputs) -> tuple[Tensor, Tape]:
        """See `Passes`."""
        *others, last = inputs
        last = last.detach()
        if last.is_floating_point():
            last.requires_grad_()
        output = self._output(*others, last)
        return output.detach(), (output, last)

    def gradients(self, tape: Tape, output_gradient: Tensor, *, into: Flat) -> None:
        """See `Passes`."""
        for part, gradient in zip(into.parts, torch.autograd.grad(tape[0], self._trained, output_gradient), strict=True):
            part.copy_(gradient)

    def input_gradient(self, tape: Tape, output_gradient: Tensor) -> Tensor:
        """See `Passes`."""
        output, last = tape
        gradient: Tensor = torch.autograd.grad(output, last, output_gradient)[0]
        return gradient

    def renew(self) -> None:
        """See `Passes`; the parameters themselves are used."""

    def _output(self, *inputs: Tensor) -> Tensor:
        with autocast(self._precision, inputs[0].device):
            output: Tensor = self._net(*inputs)
        return output


class _Hidden(NamedTuple):
    """One hidden layer: z = W x + b, normalised where there are `scale` and `shift` [F], and relu."""

    weight: Tensor
    bias: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None

    def forward(self, inputs: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Its activity and what `error` needs: that and, where it is normalised, z, its means and reciprocal deviations."""
        linear = functional.linear(inputs, self.weight, self.bias)
        if self.scale is None or self.shift is None:
            return linear.relu_(), (linear,)
        exact = linear.float()  # as autocast does it
        normal, mean, deviation = torch.native_layer_norm(exact, exact.shape[1:], self.scale, self.shift, _LAYER_NORM_EPS)
        activity = normal.relu_().to(linear.dtype)
        return activity, (activity, exact, mean, deviation)

    def error(self, error: Tensor, kept: Sequence[Tensor], *, gradients: bool) -> tuple[Tensor, Sequence[Tensor]]:
        """dL/dz from dL/d(activity), and the `gradients` of `scale` and `shift` where it has them and they are asked for."""
        activity, *normal = kept
        error = torch.ops.aten.threshold_backward.default(error, activity, 0)  # the kernel that autograd calls
        if not normal:
            return error, ()
        linear, *moments = normal
        through, *of_scale_and_shift = torch.ops.aten.native_layer_norm_backward.default(
            error.float(), linear, linear.shape[1:], *moments, self.scale, self.shift, [True, gradients, gradients]
        )
        return through.to(activity.dtype), of_scale_and_shift


class _Tape(NamedTuple):
    """`output`; `features` that it is made of, float32; `reached` [h_0, h_1, ..]; and of each `hidden` layer what it keeps."""

    output: Tensor
    features: Tensor
    reached: Sequence[Tensor]
    hidden: Sequence[Sequence[Tensor]]


class Written:
    """`Passes` of `dense` layers with ReLU and a linear last layer, which is computed in float32 (see `nets.Head`).

    h_0 = inputs side by side;  z_i = W_i h_{i-1} + b_i;  h_i = relu(norm(z_i));  output = W h + b, or the tanh of it
    e_i = dL/dz_i;  dL/dW_i = e_i^T h_{i-1},  dL/db_i = sum e_i,  dL/dh_{i-1} = e_i W_i
    """

    def __init__(self, weights: Flat, *, precision: Precision, last: int, layer_norm: bool, squash: bool) -> None:
        """All but the last of the layers are computed in `precision`, their normalisation in float32.

        Args:
            weights: W_1, b_1, (scale_1, shift_1,) W_2, ... of the layers, float32; after each change `renew` must be called.
            precision: of the arithmetic.
            last: features of the last input.
            layer_norm: whether hidden layers are normalised before their nonlinearity.
            squash: whether the output is a tanh.
        """
        self._exact = weights
        self._rounded = weights if precision == "fp32" else Flat.like(weights.parts, dtype=torch.bfloat16)
        self._dtype = self._rounded.whole.dtype
        self._last, self._squash = last, squash
        self._each = 4 if layer_norm else 2  # parts of a hidden layer
        self._hidden = [
            _Hidden(*self._rounded.parts[start : start + 2], *weights.parts[start + 2 : start + self._each])
            for start in range(0, len(weights.parts) - 2, self._each)
        ]
        self._head, self._head_bias = weights.parts[-2:]
        self.renew()

    def prepare(self, *inputs: Tensor) -> Tensor:
        """See `Passes`: side by side."""
        flat = [values.reshape(len(values), -1).to(self._dtype) for values in inputs]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)

    def evaluate(self, inputs: Tensor) -> Tensor:
        """See `Passes`."""
        return self.forward(inputs)[0]

    def forward(self, inputs: Tensor) -> tuple[Tensor, _Tape]:
        """See `Passes`."""
        reached, hidden = [inputs], []
        for layer in self._hidden:
            activity, kept = layer.forward(reached[-1])
            reached.append(activity)
            hidden.append(kept)
        features = reached[-1].float()
        output = functional.linear(features, self._head, self._head_bias)
        if self._squash:
            output.tanh_()
        return output, _Tape(output, features, reached, hidden)

    def gradients(self, tape: _Tape, output_gradient: Tensor, *, into: Flat) -> None:
        """See `Passes`."""
        *hidden, head, head_bias = into.parts
        error = self._unsquashed(tape.output, output_gradient)
        torch.mm(error.t(), tape.features, out=head)
        torch.sum(error, dim=0, out=head_bias)
        error = (error @ self._head).to(self._dtype)
        for level in range(len(self._hidden) - 1, -1, -1):
            error, normal = self._hidden[level].error(error, tape.hidden[level], gradients=True)
            weight, bias, *scale_and_shift = hidden[level * self._each : (level + 1) * self._each]
            weight.copy_(error.t() @ tape.reached[level])
            torch.sum(error, dim=0, dtype=torch.float32, out=bias)
            for part, gradient in zip(scale_and_shift, normal, strict=True):
                part.copy_(gradient)
            if level:
                error = error @ self._hidden[level].weight

    def input_gradient(self, tape: _Tape, output_gradient: Tensor) -> Tensor:
        """See `Passes`."""
        error = (self._unsquashed(tape.output, output_gradient) @ self._head).to(self._dtype)
        for layer, kept in zip(self._hidden[::-1], tape.hidden[::-1], strict=True):
            error = layer.error(error, kept, gradients=False)[0] @ layer.weight
        return error[:, -self._last :].float()

    def renew(self) -> None:
        """See `Passes`: weights are rounded once a change, not once a pass."""
        if self._rounded is not self._exact:
            self._rounded.whole.copy_(self._exact.whole)

    def _unsquashed(self, output: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (1.0 - output * output) if self._squash else gradient
