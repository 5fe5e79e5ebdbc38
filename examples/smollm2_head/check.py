"""Holds the training on many texts at a time against `foretoken train`'s text by text: losses, hits and gradients."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from answers import Weights, forward
from train import Batch, Text, Training, new_head, target_parts

from foretoken import zoo
from foretoken.train.eagle import Eagle3Recipe
from foretoken.train.examples import Example


def main() -> None:
    torch.manual_seed(0)
    path = Path(zoo.path("smollm2"))
    device = torch.device("cpu")
    weights = Weights.load(device, torch.float32)
    target = target_parts(path)
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length, first in ((40, 10), (71, 66), (58, 31), (33, 29)):
        texts.append(Text(torch.randint(3, 400, (length,), generator=generator).tolist(), first, 0.0))
    worst = 0.0
    for num_layers in (1, 2):
        options = argparse.Namespace(vocabulary=300, intermediate=1408, num_layers=num_layers, num_steps=4, streams=())
        head = new_head(options, texts, target)
        training = Training(head, weights, options.num_steps, 0.8, autocast=False)
        loss, by_step, right = training.losses(Batch.of(texts, options.num_steps, device))
        torch.autograd.backward(loss)
        own = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
        head.zero_grad()
        recipe = Eagle3Recipe(head, target, options.num_steps)
        recipe._laws.kept = recipe._laws.kept.float()
        sums, hits, total = [0.0] * options.num_steps, [0] * options.num_steps, 0.0
        for number, text in enumerate(texts):
            ids = torch.tensor([text.token_ids])
            with torch.no_grad():
                last, layers = forward(weights, ids, torch.arange(ids.shape[1])[None], wanted=head.shape.layer_inputs)
            streams = {layer: states[0] for layer, states in layers.items()}
            streams[30] = F.rms_norm(last[0], weights.norm.shape, weights.norm, weights.eps)
            parts = recipe.parts(Example(tuple(text.token_ids), text.first + 2, str(number)), streams)
            for step, part in enumerate(parts):
                sums[step] += float(part.loss)
                hits[step] += part.num_right
                total = total + recipe.weights[step] * part.loss
        num_drafts = sum(text.num_drafts for text in texts)
        torch.autograd.backward(total / num_drafts)
        apart = max(float((own[name] - p.grad).abs().max() / p.grad.abs().max()) for name, p in head.named_parameters())
        worst = max(worst, apart, float((by_step - torch.tensor(sums)).abs().max() / by_step.max()))
        print(num_layers, by_step.tolist(), sums, [int(part.sum()) for part in right], hits, f"gradients {apart:.1e}")
        assert [int(part.sum()) for part in right] == hits
    assert worst < 1e-3, worst


if __name__ == "__main__":
    main()
