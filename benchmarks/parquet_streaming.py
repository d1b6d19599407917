"""Trains on rows of a large Parquet file that is never read into memory: seconds and memory of each stage.

    python benchmarks/parquet_streaming.py --rows 10000000

The file is made first, row group by row group. Then come the stages of ``train_sft``: the rows are opened
(memory-mapped, in a cache beside the file), and optimizer steps take batches in shuffled order. Up to a million rows,
or with ``--workers``, all are turned into ids first (by that many further processes, into memory-mapped files); else
each step does that with its own rows. Peak RSS counts pages of mapped files, which the kernel takes back when memory is
short; ``own`` is the memory that it can't take back, and what should not grow with the texts: 8 bytes a row, for the
order.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUP = 100_000


def write_rows(path: Path, count: int, characters: int) -> None:
    """Sums with long-winded answers, never more than a row group of them in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, GROUP):
            numbers = range(start, min(start + GROUP, count))
            questions = [f"{n}+{n % 97}=" for n in numbers]
            answers = [f"{n + n % 97} since {n} and so on ".ljust(characters, "abcdefgh"[n % 8]) for n in numbers]
            writer.write_table(pa.table({"question": questions, "answer": answers}, schema=schema))


def own_mib() -> float:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux")


class Meter:
    """Prints what each stage took; looks at the memory twenty times a second."""

    def __init__(self) -> None:
        self._own = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._own = max(self._own, own_mib())
            time.sleep(0.05)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times what is inside."""
        self._own = own_mib()
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        peak, workers = (
            resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        print(
            f"{name:34s} {seconds:8.1f} s   own, peak {max(self._own, own_mib()):6.0f} MiB   "
            f"peak RSS so far {peak:6.0f} MiB, of a worker {workers:6.0f} MiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--characters", type=int, default=40, help="of an answer")
    parser.add_argument("--workers", type=int, default=0, help="--dataloader_num_workers")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of 64 rows")
    parser.add_argument("--folder", type=Path, help="where file, caches and model go; a temporary one if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        run(options, folder)


def run(options: argparse.Namespace, folder: Path) -> None:
    """Make the file and train on it."""
    from openrlhf import platform

    platform.prepare_process()
    from openrlhf.config import parse_cli
    from openrlhf.datasets.sft import open_sft_dataset
    from openrlhf.datasets.sources import load_configured_rows
    from openrlhf.models.loading import load_causal_lm, load_tokenizer
    from openrlhf.models.logprobs import PolicyModel
    from openrlhf.trainer.sft import SFTTrainer
    from openrlhf.trainer.supervised import train_engine
    from openrlhf.utils.tiny_model import make_tiny_model
    from openrlhf.workers.distributed import init_distributed, shutdown

    path = folder / "rows.parquet"
    meter = Meter()
    with meter.stage(f"write {options.rows} rows"):
        write_rows(path, options.rows, options.characters)
    texts = options.rows * options.characters
    print(f"the file has {path.stat().st_size / 2**20:.0f} MiB, its texts {texts / 2**20:.0f} MiB")
    model = make_tiny_model(folder / "model")
    flags = f"--pretrain {model} --dataset {path} --input_key question --output_key answer --param_dtype fp32"
    flags += " --train_batch_size 64 --micro_train_batch_size 16 --max_len 512 --learning_rate 1e-3"
    flags += f" --dataloader_num_workers {options.workers} --max_samples {options.rows} --save_path {folder / 'out'}"
    flags += " --packing_samples"
    cfg = parse_cli("train_sft", [*flags.split(), "--ckpt_path", str(folder / "ckpt")])
    world = init_distributed()
    tokenizer = load_tokenizer(model)
    started = time.perf_counter()
    with meter.stage("open the rows"):
        data = open_sft_dataset(load_configured_rows(cfg), cfg, tokenizer)
    assert data.num_usable == options.rows
    with meter.stage("start the model"):
        engine = train_engine(cfg, PolicyModel, load_causal_lm(model, cfg), options.steps)
    with meter.stage("the first step of 64 shuffled rows"):
        SFTTrainer(cfg, world, engine, tokenizer, data, None, 1).fit()
    print(f"from the start to the end of the first step: {time.perf_counter() - started:.1f} s")
    trainer = SFTTrainer(cfg, world, engine, tokenizer, data, None, options.steps)
    with meter.stage(f"{options.steps - 1} further steps"):
        trainer.fit()
    shutdown()


if __name__ == "__main__":
    main()
