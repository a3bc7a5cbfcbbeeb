"""The part of the build that pyproject.toml cannot say: kernels in plain C, loaded with ctypes by any Python.

Without a compiler the installation goes on without them, and NumPy does their work.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "quantize.native.rounding",
            sources=[f"quantize/native/{name}.c" for name in ("rounding", "calibrated", "products", "casts")],
            depends=["quantize/native/native.h"],
            # The bytes must be NumPy's: no contraction to fused multiply-adds, no reordering.
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fvisibility=hidden",
            ],
            libraries=["m"],
            optional=True,
        )
    ]
)
