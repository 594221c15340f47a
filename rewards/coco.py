"""COCO's 80 classes under the names that GenEval's metadata has for them.

Three of them are GenEval's own: ``tv remote``, ``computer mouse`` and ``computer keyboard`` are COCO's remote, mouse and
keyboard. So detectors are read by class index, never by their own label names. Source: ``evaluation/object_names.txt`` of
the public repository djghosh13/geneval (Ghosh et al. 2023, arXiv:2310.11513).
"""

CLASSES = tuple(
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign, parking
    meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, handbag, tie,
    suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket,
    bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza,
    donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse, tv remote, computer
    keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, hair drier,
    toothbrush""".replace("\n    ", " ").split(", ")
)
"""By COCO's contiguous index, 0 = person."""
