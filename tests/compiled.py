"""Runs every mechanism once in the dtype that is named, so that the Numba kernels of the tests are in the cache."""

import sys

import torch

import subquad
from subquad.attention.registry import mechanism
from subquad.testing import cases


def main(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    for name in subquad.available():
        for example in mechanism(name).examples:
            for case in cases(name, **example):
                inputs = [x.requires_grad_() for x in case.inputs(130, dtype)]
                out = case.run(case.make(dtype), inputs)
                if out.requires_grad:
                    out.sum().backward()


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
