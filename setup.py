"""Package metadata. What is required stands in requirements.txt and requirements/*.txt only."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """The requirement lines of a file, without comments and blank lines."""
    lines = (line.split("#", 1)[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


setup(
    name="openrlhf",
    version="0.1.0",
    description="Reinforcement learning of language models with Ray, DeepSpeed and vLLM",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The openrlhf authors",
    license="Apache-2.0",
    python_requires=">=3.11",  # as vLLM
    packages=find_packages(include=["openrlhf", "openrlhf.*"]),
    install_requires=requirements("requirements.txt"),
    extras_require={extra: requirements(f"requirements/{extra}.txt") for extra in ("gpu", "cpu", "dev")},
    entry_points={
        "console_scripts": ["openrlhf = openrlhf.cli.main:console"],
        "vllm.general_plugins": ["openrlhf_weight_sync = openrlhf.engines.weight_sync.plugin:register"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
