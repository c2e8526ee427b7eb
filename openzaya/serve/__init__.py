"""From a checkpoint to text: one request from its prompt to its last character.

A request passes the files in this order:

1. `loading.py` finds the newest whole checkpoint and opens model and tokenizer.
2. `generate.py` runs the prompts (all rows at once, padding only where lengths differ) and keeps
   what the model must remember of each row: keys and values, the tail of the convolutions and the
   lagged half of the value (`openzaya.model.state`). From then on a token costs one forward of one
   column, and a row that has ended costs nothing.
3. `sampling.py` draws each row's next token from that row's own logits and random numbers, so that
   no row ever depends on its neighbours.
4. `text.py` turns tokens into text as they come: never half a character, never a piece of a stop
   string, and reasoning apart from the answer.

A conversation is `session.py`: it keeps the state from turn to turn and runs only what is new;
`chat_format.py` says how turns become tokens, and `tool_calls.py` reads the calls of functions in
an answer.

    model, tokenizer = open_checkpoint(Path("runs/first"))
    [completion] = generate(model, tokenizer, [tokenizer.encode("Once upon")], SamplingSettings())
    print(completion.text)
"""
