"""Models and runs on disk.

What is stored, and how it is found (formats: `docs/formats.md`):

- `tensors.py`: the one table: names, shapes and presence of every tensor in both layouts.
- `dialects.py`, `native_config.py`, `legacy_config.py`, `shared_config.py`: config.json.
- `headers.py`, `weights.py`: stored tensors, fitted to the table and read piece by piece, checked.
- `manifest.py`, `atomic.py`: digests; files and folders that appear complete or not at all.
- `hub.py`, `run.py`: from what a user types to a folder: hub ids, and the checkpoints of a run.

What is done with it:

- `load.py`, `save.py`: into memory, and from it. What we write opens in `transformers`.
- `plan.py`, `convert.py`, `companions.py`: from one dialect to another, with all that goes along.
- `compare.py`: are two checkpoints the same model?
- `trace.py`, `trace_file.py`, `trace_compare.py`: every sub-layer's numbers, and where two
  implementations part; `golden/` is a tiny model with its trace.
- `lora.py`, `lora_names.py`: adapters in PEFT's format.
"""
