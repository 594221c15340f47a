"""A Mask2Former of a hundred thousand weights in the files that the published one comes in."""

from pathlib import Path

import torch

QUERIES = 6


def make_mask2former(*, labels=80, seed=0):
    """Random weights, the two heads' sharpened so that some queries are sure of something."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=QUERIES,
        num_labels=labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Mask2FormerForUniversalSegmentation(config).eval()
        with torch.no_grad():
            network.class_predictor.weight.normal_(0, 1.0)
            list(network.model.transformer_module.decoder.mask_predictor.mask_embedder.parameters())[-2].normal_(0, 3.0)
    return network


def write_mask2former(folder, **options):
    """``config.json`` and ``model.safetensors``. Returns the folder."""
    make_mask2former(**options).save_pretrained(folder)
    return Path(folder)
