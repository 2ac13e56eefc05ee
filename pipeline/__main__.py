"""``python -m ul2q.pipeline`` is the ``pipeline`` command (what torchrun starts)."""

from ul2q.pipeline.cli.app import main

if __name__ == "__main__":
    main()
