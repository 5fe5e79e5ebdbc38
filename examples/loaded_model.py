"""Draft for a model that you have loaded yourself. It is not modified. Prompts and outputs are token ids."""

import torch
from transformers import AutoModelForCausalLM

from foredraft import LLM, SamplingParams, zoo

target = AutoModelForCausalLM.from_pretrained(zoo.path("tiny", "target"), dtype=torch.float32)
drafter = AutoModelForCausalLM.from_pretrained(zoo.path("tiny", "draft"), dtype=torch.float32)
llm = LLM(target, speculative_config={"model": drafter, "num_speculative_tokens": 4})

prompt = [43, 531, 82, 1512]
(output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
print(output.outputs[0].token_ids)

theirs = target.generate(
    torch.tensor([prompt]), attention_mask=torch.ones(1, 4), max_new_tokens=24, do_sample=False, eos_token_id=None
)
assert theirs[0, 4:].tolist() == list(output.outputs[0].token_ids)
