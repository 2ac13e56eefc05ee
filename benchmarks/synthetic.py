"""Cost of having no data: accuracy with synthetic inputs against accuracy with the training samples.

    python benchmarks/synthetic.py MODEL.pt … [--data mnist5k] [--wbits 2,4] [--samples 512]

Every checkpoint is compressed at each width with 8-bit activations, with and without fine-tuning: from
synthetic inputs that match its batch norm statistics (`--synthetic`), and from the data. Accuracies are those
of the lowered network, which ONNX Runtime reproduces code by code, on the test samples of the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ul2q import QuantConfig, compress, load_checkpoint
from ul2q.pipeline.compression.samples import draw_samples
from ul2q.pipeline.data import load_data
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.tasks.accuracy import measure_accuracy


def main() -> None:
    """Print one row for each checkpoint, width and kind of inputs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--data", default="mnist5k")
    parser.add_argument("--wbits", default="2,4")
    parser.add_argument("--samples", type=int, default=512)
    options = parser.parse_args()
    for path in options.models:
        source = load_checkpoint(path)
        real = load_data(options.data, preprocess=source.preprocess, input_shape=source.input_shape)
        assert real.test is not None  # noqa: S101
        config = QuantConfig(wbits=2, samples=options.samples)
        drawn = draw_samples(source, config, None, None, Progress(quiet=True))
        print(f"{path.name}: float {measure_accuracy(source.model, real.test).top1:.4f}", flush=True)
        for width in map(int, options.wbits.split(",")):
            for epochs in (0, None):
                config = QuantConfig(
                    wbits=width, samples=options.samples, epochs=epochs, task="classification"
                )
                scores = [
                    measure_accuracy(compress(source.model, data, config).module, real.test).top1
                    for data in (drawn, real)
                ]
                print(
                    f"  {width} bits, {config.finetune_epochs} epochs: synthetic {scores[0]:.4f}, "
                    f"real {scores[1]:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
