"""From documents to batches, with the order of the data a pure function of (recipe, seed, step).

Start with `sources.py`: it reads the documents that a recipe's source names. `tokenizer.py` turns
text into ids (`vocabulary.py` trains one on the recipe's own sources), `chat.py` defines the chat
format and which of its tokens are learned, `template.py` renders those of other models,
`conversations.py` takes rows of chat data through either, and `tasks.py` (with `stories.py` and
`talk.py`) generates arithmetic with worked steps and verifiable answers. Tokenised text lies in
shards (`shards.py`: the format and how it is read; docs/data.md says why): `encode.py` makes ids of
a corpus in several processes, `split.py` says which documents are held out, `shard_writer.py` and
`shard_build.py` write them, `store.py` opens those that a recipe names or keeps a cache of its own.
`read_model.py` says what reading asks of the storage. What comes where is computed, never stored:
`rng.py` hashes keys to numbers, `permutation.py` shuffles range(n) without a table, `mixture.py`
gives each sequence slot of a phase to a source. `packing.py` lays documents into rows of tokens,
targets and positions, `readers.py` yields row number k of one source, and `batches.py` puts it
together: `DataPlan.batch` is the batch of any step, asked for in any order.
"""
