"""Speed up `model.generate` with one argument: the same text, streamed, with a stop string."""

from transformers import TextStreamer

from foredraft import speculate, zoo

model, drafter, tokenizer = zoo.load("tiny")
inputs = tokenizer("Once upon a time there was a little girl who", return_tensors="pt")

faster = speculate("draft_model", model=drafter, tokenizer=tokenizer, stop_strings="\n\n")
output = model.generate(
    **inputs, max_new_tokens=48, do_sample=False, custom_generate=faster, streamer=TextStreamer(tokenizer)
)

plain = model.generate(**inputs, max_new_tokens=48, do_sample=False, stop_strings="\n\n", tokenizer=tokenizer)
assert output.tolist() == plain.tolist()
print(f"{faster.stats.tokens_per_step:.2f} tokens per forward of the target")
