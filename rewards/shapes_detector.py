"""Detector for the world "shapes": coloured solid shapes on a plain light-grey ground. No learned parts.

1. **Segmentation.** Each pixel is read as a mixture ``p = ground + a (colour - ground)`` for each palette colour; ``a``
   in [0, 1] is the *coverage* (least squares), and the colour of the smallest residual wins. So an antialiased edge
   between black and the ground, plain grey, is half-covered black and no colour of its own. Pixels with ``a >= 1/2``
   and a small residual (averaged over 3 x 3 pixels against noise) are solid.
2. **Components.** Solid pixels of one colour, connected by their sides (``scipy.ndimage.label``); specks are dropped.
3. **Classification.** The component's coverage is resampled into a frame of its own, centred at its mean and scaled by
   its standard deviation (so that place and size fall out), and compared with templates: ideal shapes sent through the
   very same measurement. The likeness is the soft intersection over union, ``sum min / sum max``: the confidence.

Notation: N images, C colours, P = N C planes, K components, G x G samples of a component's frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import ndimage
from torch import Tensor

from rewards.geneval_rules import Detection

SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLORS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.10, 0.25, 0.90),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.60, 0.15, 0.75),
    "black": (0.05, 0.05, 0.05),
}
"""Palette, RGB in [0, 1]."""
BACKGROUND = (0.85, 0.85, 0.85)
"""Colour of the ground, RGB in [0, 1]."""

MIN_CONFIDENCE = 0.70
"""Components less like every template than this are no objects."""
MIN_EXTENT, MAX_EXTENT = 6, 15
"""Least and greatest side of an object's box, in pixels of an image of side 32."""

_SIDE = 32  # the image side in pixels that all lengths below are given for
_SIZES = (8.0, 9.0, 10.0, 11.0, 12.0, 13.0)  # template sizes
_SHIFTS = (0.0, 0.25, 0.5, 0.75)  # sub-pixel places a template is averaged over
_MIN_AREA = 16  # solid pixels of the smallest object; smaller ones are specks
_MAX_RESIDUAL = 0.3  # RGB distance beyond which a pixel has no palette colour
_FRAME = np.linspace(-3.0, 3.0, 17, dtype=np.float32)  # sample places in standard deviations, along each axis
_HOLE, _ARM = 0.5, 1 / 3  # inner over outer radius of a ring; half-width over half-length of a cross's arm
_IN_PLANE = np.zeros((3, 3, 3), dtype=bool)
_IN_PLANE[1] = ndimage.generate_binary_structure(2, 1)


@dataclass(frozen=True, kw_only=True)
class Components:
    """The connected solid regions, specks left out."""

    owner: np.ndarray
    """``[P, H, W]`` int: component 1..K whose shape the pixel belongs to, 0 = none. A component owns its solid pixels
    and their uncoloured neighbours, which hold its antialiased edge."""
    plane: np.ndarray
    """``[K]`` int: plane ``n C + c`` of each component."""
    box: np.ndarray
    """``[K, 4]`` float: ``x0, y0, x1, y1`` in pixels, of the solid pixels."""
    area: np.ndarray
    """``[K]`` int: number of solid pixels."""

    @property
    def extent(self) -> np.ndarray:
        """``[K, 2]``: the box's width and height, in pixels of an image of side 32."""
        return (self.box[:, 2:] - self.box[:, :2]) * (_SIDE / self.owner.shape[-1])


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """What colour covers which pixel, and which pixels hang together."""

    coverage: np.ndarray
    """``[N, C, H, W]`` float32 in [0, 1]: share of the pixel that colour c would cover if it were the only one."""
    color: np.ndarray
    """``[N, H, W]`` int: index into :data:`COLORS` of the solid pixels' colour, -1 elsewhere."""
    components: Components


def detect(images: Tensor) -> list[dict[str, list[Detection]]]:
    """Find the shapes of ``images [N, 3, H, H]`` (float in [0, 1]): per image, class -> objects by falling confidence.

    Lengths scale with H (objects of about H/4 to 2H/5). ``ValueError`` if the images are not square.
    """
    return classify(segment(images))


def segment(images: Tensor) -> Segmentation:
    """Points 1 and 2 of the module's docstring for ``images [N, 3, H, H]``, float in [0, 1]."""
    if images.ndim != 4 or images.shape[-1] != images.shape[-2]:
        raise ValueError(f"images of shape {tuple(images.shape)}: the shapes detector reads square images [N, 3, H, H]")
    offset = images.detach().float().cpu().numpy() - np.asarray(BACKGROUND, np.float32)[:, None, None]  # [N, 3, H, W]
    axes = np.asarray(list(COLORS.values()), np.float32) - np.asarray(BACKGROUND, np.float32)  # [C, 3]
    dot = np.einsum("cr,nrhw->nchw", axes, offset)
    length = np.square(axes).sum(1)[:, None, None]  # [C, 1, 1], squared
    coverage = np.clip(dot / length, 0.0, 1.0)
    residual = np.square(offset).sum(1, keepdims=True) + coverage * (coverage * length - 2 * dot)  # squared
    residual = ndimage.uniform_filter(residual, size=3, axes=(2, 3), mode="nearest")
    color = residual.argmin(1)
    chosen = color[:, None]
    solid = np.take_along_axis(coverage, chosen, 1)[:, 0] >= 0.5
    solid &= np.take_along_axis(residual, chosen, 1)[:, 0] <= _MAX_RESIDUAL**2
    color = np.where(solid, color, -1)
    return Segmentation(coverage=coverage, color=color, components=_components(color))


def classify(seg: Segmentation) -> list[dict[str, list[Detection]]]:
    """Point 3 of the module's docstring: the components that look like a shape, as :func:`detect` returns them."""
    parts = seg.components
    images, colors, side, _ = seg.coverage.shape
    crops, deviation = _normalise(seg.coverage.reshape(-1, side, side), parts.owner, parts.plane)
    likeness = _likeness(crops, deviation * (_SIDE / side))
    best = likeness.max(1)
    is_object = (best >= MIN_CONFIDENCE) & (parts.extent.min(1) >= MIN_EXTENT) & (parts.extent.max(1) <= MAX_EXTENT)
    found: list[dict[str, list[Detection]]] = [{} for _ in range(images)]
    names = tuple(COLORS)
    for k in np.argsort(-best, kind="stable"):
        if is_object[k]:
            image, color = divmod(int(parts.plane[k]), colors)
            item = Detection(box=parts.box[k].tolist(), score=float(best[k]), color=names[color])
            found[image].setdefault(SHAPES[likeness[k].argmax()], []).append(item)
    return found


def _components(color: np.ndarray) -> Components:
    """The components of solid pixels ``color [N, H, W]``."""
    side = color.shape[-1]
    planes = (color[:, None] == np.arange(len(COLORS))[:, None, None]).reshape(-1, side, side)
    labels = np.zeros(planes.shape, np.int32)
    ndimage.label(planes, structure=_IN_PLANE, output=labels)
    area = np.bincount(labels.ravel(), minlength=1)
    kept = area >= _MIN_AREA * (side / _SIDE) ** 2
    kept[0] = False
    labels = (kept.cumsum() * kept)[labels]
    slices = ndimage.find_objects(labels) if kept.any() else []
    free = np.repeat(color < 0, len(COLORS), axis=0)
    edge = ndimage.maximum_filter(labels, size=(1, 3, 3)) * free
    return Components(
        owner=np.where(labels > 0, labels, edge),
        plane=np.array([plane.start for plane, _, _ in slices], dtype=int),
        box=np.array([(x.start, y.start, x.stop, y.stop) for _, y, x in slices], dtype=float).reshape(-1, 4),
        area=area[kept],
    )


def _normalise(coverage: np.ndarray, owner: np.ndarray, plane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each component in its own frame: ``coverage [P, H, W]``, ``owner [P, H, W]``, ``plane [K]`` -> samples
    ``[K, G, G]`` and standard deviation ``[K]`` in pixels (root of the mean of the two axes' variances)."""
    p, y, x = np.nonzero(owner)
    k = owner[p, y, x] - 1
    weight = coverage[p, y, x]
    count = len(plane)
    mass = np.bincount(k, weight, count)
    centre_x, centre_y = (np.bincount(k, weight * axis, count) / mass for axis in (x, y))
    squared = (x - centre_x[k]) ** 2 + (y - centre_y[k]) ** 2
    deviation = np.sqrt(np.bincount(k, weight * squared, count) / mass / 2)
    rows, columns = (c[:, None] + deviation[:, None] * _FRAME for c in (centre_y, centre_x))  # [K, G] each
    return _sample(coverage, owner, plane, rows[:, :, None], columns[:, None, :]), deviation


def _sample(coverage: np.ndarray, owner: np.ndarray, plane: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Bilinear samples of each component's own coverage (0 outside it) at ``y [K, G, 1]``, ``x [K, 1, G]`` pixels."""
    side = owner.shape[-1]
    component = np.arange(1, len(plane) + 1)[:, None, None]
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    samples = np.zeros((len(plane), y.shape[1], x.shape[2]), np.float32)
    for dy in (0, 1):
        for dx in (0, 1):
            row, column = top + dy, left + dx
            inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
            at = (plane[:, None, None], row.clip(0, side - 1), column.clip(0, side - 1))
            value = np.where(inside & (owner[at] == component), coverage[at], 0.0)
            samples += value * (1 - np.abs(y - row)) * (1 - np.abs(x - column))
    return samples


def _likeness(crops: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Soft intersection over union of ``crops [K, G, G]`` with each shape's template of nearest size -> ``[K, 5]``."""
    templates, deviations = _templates()
    result = np.zeros((len(crops), len(SHAPES)))
    for index in range(len(SHAPES)):
        size = np.abs(deviation[:, None] - deviations[index]).argmin(1)
        template = templates[index, size]
        union = np.maximum(crops, template).sum((1, 2))
        result[:, index] = np.minimum(crops, template).sum((1, 2)) / union
    return result


@cache
def _templates() -> tuple[np.ndarray, np.ndarray]:
    """Ideal shapes as :func:`_normalise` sees them: samples ``[5, sizes, G, G]`` and deviations ``[5, sizes]``, each
    the mean over sub-pixel places."""
    places = [(sx, sy) for sx in _SHIFTS for sy in _SHIFTS]
    drawn = np.stack([_draw(shape, size, place) for shape in SHAPES for size in _SIZES for place in places])
    owner = (drawn > 0) * np.arange(1, len(drawn) + 1)[:, None, None]
    crops, deviation = _normalise(drawn, owner, np.arange(len(drawn)))
    groups = (len(SHAPES), len(_SIZES), len(places))
    return crops.reshape(*groups, *crops.shape[1:]).mean(2), deviation.reshape(groups).mean(2)


def _draw(shape: str, size: float, place: tuple[float, float], steps: int = 8) -> np.ndarray:
    """Coverage ``[32, 32]`` of one shape whose box of ``size`` pixels is centred at the image's centre + ``place``."""
    axis = (np.arange(_SIDE * steps) + 0.5) / steps - _SIDE / 2
    u, v = (axis - place[0]) * 2 / size, ((axis - place[1]) * 2 / size)[:, None]
    inside = (np.abs(u) <= 1) & (np.abs(v) <= 1) & _INSIDE[shape](u, v)
    return inside.reshape(_SIDE, steps, _SIDE, steps).mean((1, 3), dtype=np.float32)


# Points (u right, v down) of the box [-1, 1]^2 that belong to a shape.
_INSIDE = {
    "circle": lambda u, v: u**2 + v**2 <= 1,
    "square": lambda u, v: np.ones(np.broadcast_shapes(u.shape, v.shape), bool),
    "triangle": lambda u, v: 2 * np.abs(u) <= v + 1,
    "cross": lambda u, v: np.minimum(np.abs(u), np.abs(v)) <= _ARM,
    "ring": lambda u, v: (u**2 + v**2 <= 1) & (u**2 + v**2 >= _HOLE**2),
}
