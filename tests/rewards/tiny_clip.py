"""CLIP networks of a few hundred weights in the files that the published ones come in, and pictures to show them."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SIDE = 16
"""Pixels of the square images that the networks read."""
TOKENS = 36
"""Longest prompt of the transformers CLIP, tokens: letters, and one each for start and end."""
LOGIT_SCALE = 20.0
PROMPTS = ["a red circle", "two blue squares left of a ring", "cross"]
OPEN_CLIP = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": SIDE, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 2},
}
"""A network in open_clip's format."""


@torch.no_grad()
def randomise(network, seed):
    """Weights large enough that every image and prompt has features of its own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.ndim:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return network


def write_clip(folder, *, seed=0):
    """A whole transformers CLIP: network, tokenizer and image processor. Returns the folder."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    from tests.tiny_models import clip_tokenizer

    common = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        projection_dim=6,
        logit_scale_init_value=math.log(LOGIT_SCALE),
        text_config={
            "vocab_size": 54,
            "max_position_embeddings": TOKENS,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **common,
        },
        vision_config={"image_size": SIDE, "patch_size": 8, **common},
    )
    randomise(CLIPModel(config), seed).save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return Path(folder)


def write_hpsv2(folder, name="HPS_v2.1_compressed.pt", *, seed=2):
    """A checkpoint and ``tiny.json``, the architecture it is of. Returns the two paths."""
    import open_clip

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    architecture, checkpoint = folder / "tiny.json", folder / name
    architecture.write_text(json.dumps(OPEN_CLIP))
    torch.save({"state_dict": randomise(open_clip.CLIP(**OPEN_CLIP), seed).state_dict()}, checkpoint)
    return checkpoint, architecture


def pictures(*sizes, seed=0):
    """One picture of smooth random colours per size (width, height)."""
    random = np.random.default_rng(seed)
    coarse = [Image.fromarray(random.integers(0, 256, (5, 5, 3), dtype=np.uint8)) for _ in sizes]
    return [picture.resize(size, Image.Resampling.BICUBIC) for picture, size in zip(coarse, sizes, strict=True)]


def resized_by_pil(picture):
    """CLIP's preprocessing, written out: shortest side to SIDE by PIL, central square, normalised. ``[3, SIDE, SIDE]``."""
    width, height = picture.size
    short = min(width, height)
    picture = picture.resize((SIDE * width // short, SIDE * height // short), Image.Resampling.BICUBIC)
    left, top = (picture.width - SIDE) // 2, (picture.height - SIDE) // 2
    pixels = np.asarray(picture.crop((left, top, left + SIDE, top + SIDE)), dtype=np.float32) / 255
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return ((pixels - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1)


def spelled(prompt):
    """The ids of the transformers CLIP's tokens: start, the letters (one per token, the last of a word marked), end."""
    words = [[ord(letter) - ord("a") + 2 for letter in word] for word in prompt.split()]
    letters = [token for word in words for token in (*word[:-1], word[-1] + 26)]
    return torch.tensor([[0, *letters[: TOKENS - 2], 1]])


@torch.no_grad()
def unit_features(folder, pictures, prompts):
    """Normalised features ``[N, 6]`` of pictures and prompts by matrix products on what the two towers put out."""
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folder)
    pixels = torch.from_numpy(np.stack([resized_by_pil(picture) for picture in pictures]))
    image = model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T
    text = torch.cat([model.text_model(spelled(prompt)).pooler_output for prompt in prompts])
    text = text @ model.text_projection.weight.T
    return tuple((f / f.square().sum(1, keepdim=True).sqrt()).double() for f in (image, text))
