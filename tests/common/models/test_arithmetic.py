"""Which arithmetic a processor is asked for."""

from __future__ import annotations

import platform
from types import MappingProxyType

import pytest
import torch

from common.models import arithmetic
from common.models.arithmetic import CPU

pytestmark = pytest.mark.pure

CUDA = torch.device("cuda")


@pytest.fixture
def cpu(monkeypatch):
    """`cpu(avx512_bf16=True)`: a processor that has what is named, and nothing else."""

    def has(**capabilities):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(capabilities))

    return has


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16", "bf16"])
def test_bfloat16_is_computed_where_the_processor_has_instructions_for_it(cpu, name):
    """Of Intel, AMD and ARM."""
    cpu(**{name: True})
    assert arithmetic.native("bf16", CPU) == "bf16"
    assert arithmetic.native("fp32", CPU) == "fp32"


def test_a_processor_without_them_computes_in_float32(cpu):
    """To emulate bfloat16 took three times as long as float32 with AVX2."""
    cpu(avx2=True, avx512_f=True, avx512_bf16=False)
    assert arithmetic.native("bf16", CPU) == "fp32"


def test_instructions_that_torch_does_not_use_do_not_count(cpu, monkeypatch):
    """A build without oneDNN has its own slow way, whatever the processor could."""
    cpu(bf16=True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert arithmetic.native("bf16", CPU) == "fp32"


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "fp32")])
def test_a_gpu_is_asked_for_what_it_has_itself(cpu, monkeypatch, supported, expected):
    """Torch would emulate on an old one, too."""
    cpu()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or supported)
    assert arithmetic.native("bf16", CUDA) == expected


@pytest.mark.skipif(platform.machine() not in {"x86_64", "aarch64"}, reason="no other processor is known")
def test_torch_calls_the_instructions_by_the_names_we_look_for():
    """A name that torch changed would make every run slow, and no other test would fail."""
    assert {"x86_64": {"avx512_bf16", "amx_bf16"}, "aarch64": {"bf16"}}[platform.machine()] <= set(torch.cpu.get_capabilities())
