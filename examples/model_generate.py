"""Speed up `model.generate` with one argument: the same output, streamed, with a stop string."""

from transformers import TextStreamer

from foredraft import speculate, zoo

model, _, tokenizer = zoo.load(zoo.default())
messages = [{"role": "user", "content": "Write a Python list of the seven days of the week."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")

faster = speculate(tokenizer=tokenizer, stop_strings="\n\n")
output = model.generate(
    **inputs, max_new_tokens=48, do_sample=False, custom_generate=faster, streamer=TextStreamer(tokenizer)
)

plain = model.generate(**inputs, max_new_tokens=48, do_sample=False, stop_strings="\n\n", tokenizer=tokenizer)
assert output.tolist() == plain.tolist()
print(f"{faster.stats.tokens_per_step:.2f} tokens per forward pass of the target")
