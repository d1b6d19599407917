"""Imported by the process that vLLM's core is forked from (:mod:`openrlhf.engines.core_process`), and nowhere else."""

from __future__ import annotations

import traceback

from openrlhf.utils.process import die_with_parent

die_with_parent()
try:
    # What vLLM imports before it forks its core where it may; no part of it touches a GPU, which forks could not use.
    import vllm.v1.engine.core  # noqa: F401
    from vllm.utils.system_utils import set_process_title

    set_process_title("CoreImports")  # the core has a title of its own
except Exception:
    traceback.print_exc()  # what is wrong stops the engine, too: it imports the same
