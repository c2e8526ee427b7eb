"""Models and runs on disk.

- `atomic.py`: files and folders that appear complete or not at all, with digests.
- `native.py`: the native dialect: what we write opens in `transformers` with no conversion.
- `run.py`: the checkpoints of one training run: newest good one, retention, resume.
"""
