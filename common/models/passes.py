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
from common.models.spec import Precision

Tape: TypeAlias = Any
"""What a forward pass leaves for the backward passes; of use to the object alone that made it."""
_LAYER_NORM_EPS = 1e-5  # torch's
_relu_backward = torch.ops.aten.threshold_backward.grad_input  # the kernel that autograd calls


class Prepared(Protocol):
    """Inputs of N rows in the form that passes take them; those of networks of one architecture are alike."""

    def __getitem__(self, rows: slice) -> Self:
        """Some of the rows."""


class Passes(Protocol):
    """The passes through one network."""

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
    columns: Tensor  # the transposed weight: a view that is made once
    bias: Tensor
    scale: Tensor | None
    shift: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Self:
        """By its parameters."""
        return cls(weight, weight.t(), bias, scale, shift)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Its activity, and what `error` needs beside that where it is normalised: z, its means and reciprocal deviations."""
        linear = torch.addmm(self.bias, inputs, self.columns)
        if self.scale is None or self.shift is None:
            return linear.relu_(), ()
        exact = linear.float()  # as autocast does it
        normal, mean, deviation = torch.native_layer_norm(exact, exact.shape[1:], self.scale, self.shift, _LAYER_NORM_EPS)
        return normal.relu_().to(linear.dtype), (exact, mean, deviation)

    def error(
        self, error: Tensor, activity: Tensor, kept: Sequence[Tensor], *, gradients: bool
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """dL/dz from dL/d(activity), overwritten, and the `gradients` of `scale` and `shift` where they are asked for."""
        _relu_backward(error, activity, 0, grad_input=error)
        if not kept:
            return error, ()
        linear, *moments = kept
        through, *of_scale_and_shift = torch.ops.aten.native_layer_norm_backward.default(
            error.float(), linear, linear.shape[1:], *moments, self.scale, self.shift, [True, gradients, gradients]
        )
        return through.to(activity.dtype), of_scale_and_shift


class _Tape(NamedTuple):
    """`output`; `features` that it is made of, float32; `reached` [h_0, h_1, ..]; and of each hidden layer what it `kept`."""

    output: Tensor
    features: Tensor
    reached: Sequence[Tensor]
    kept: Sequence[Sequence[Tensor]]


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
            _Hidden.of(*self._rounded.parts[start : start + 2], *weights.parts[start + 2 : start + self._each])
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
        reached, kept = [inputs], []
        for layer in self._hidden:
            activity, moments = layer.forward(reached[-1])
            reached.append(activity)
            kept.append(moments)
        features = reached[-1].float()
        output = functional.linear(features, self._head, self._head_bias)
        if self._squash:
            output.tanh_()
        return output, _Tape(output, features, reached, kept)

    def gradients(self, tape: _Tape, output_gradient: Tensor, *, into: Flat) -> None:
        """See `Passes`."""
        *hidden, head, head_bias = into.parts
        error = self._unsquashed(tape.output, output_gradient)
        torch.mm(error.t(), tape.features, out=head)
        torch.sum(error, dim=0, out=head_bias)
        error = torch.mm(error, self._head).to(self._dtype)
        for level in range(len(self._hidden) - 1, -1, -1):
            error, normal = self._hidden[level].error(error, tape.reached[level + 1], tape.kept[level], gradients=True)
            weight, bias, *scale_and_shift = hidden[level * self._each : (level + 1) * self._each]
            _product(error, tape.reached[level], into=weight)
            torch.sum(error, dim=0, dtype=torch.float32, out=bias)
            for part, gradient in zip(scale_and_shift, normal, strict=True):
                part.copy_(gradient)
            if level:
                error = torch.mm(error, self._hidden[level].weight)

    def input_gradient(self, tape: _Tape, output_gradient: Tensor) -> Tensor:
        """See `Passes`."""
        error = torch.mm(self._unsquashed(tape.output, output_gradient), self._head).to(self._dtype)
        for level in range(len(self._hidden) - 1, -1, -1):
            layer = self._hidden[level]
            error, _ = layer.error(error, tape.reached[level + 1], tape.kept[level], gradients=False)
            error = torch.mm(error, layer.weight)
        return error[:, -self._last :].float()

    def renew(self) -> None:
        """See `Passes`: weights are rounded once a change, not once a pass."""
        if self._rounded is not self._exact:
            self._rounded.whole.copy_(self._exact.whole)

    def _unsquashed(self, output: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (1.0 - output * output) if self._squash else gradient


def _product(error: Tensor, inputs: Tensor, *, into: Tensor) -> None:
    """e^T h; the other way round where h is narrow, which takes half as long."""
    if inputs.shape[1] < error.shape[1]:
        into.copy_(torch.mm(inputs.t(), error).t())
    elif inputs.dtype == into.dtype:
        torch.mm(error.t(), inputs, out=into)
    else:
        into.copy_(torch.mm(error.t(), inputs))
