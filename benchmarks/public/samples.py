"""Draw inputs for public networks: patches of photographs, rendered text, speech-like signals, tones.

Everything is made of what packages ship: photographs of scikit-image, scikit-learn and matplotlib, fonts of
matplotlib, and the English text of the standard library's `pydoc_data.topics`. Samples for an evaluation
(``evaluation=True``) are mirrored patches, other words and other signals than those for a calibration.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from pydoc_data import topics

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Pixels = npt.NDArray[np.float32]

_RATE, _FRAME = 16_000, 1024
# Centre of the face in matplotlib's grace_hopper.jpg, row and column, and about its size.
_FACE, _FACE_SIZE = (220, 265), 230
_PHOTOGRAPHS = (
    "astronaut.png", "chelsea.png", "coffee.png", "ihc.png", "motorcycle_left.png", "retina.jpg",
    "rocket.jpg", "hubble_deep_field.jpg",
)  # fmt: skip
_FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif",
    "DejaVuSerif-Italic", "STIXGeneral",
)  # fmt: skip
# Formants of vowels in Hz.
_VOWELS = (
    (730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410),
    (490, 1350, 1690),
)  # fmt: skip
_IMAGENET = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


def frames(count: int, seed: int = 0) -> Pixels:
    """Return normalised frames [N, 1024] of harmonic tones between 60 and 1,500 Hz with noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(_FRAME) / _RATE
    pitch = 60 * 25 ** rng.random((count, 1))
    wave = np.zeros((count, _FRAME))
    for k in range(1, 6):
        strength, phase = rng.random((count, 1)) / k, 2 * np.pi * rng.random((count, 1))
        wave += strength * np.sin(2 * np.pi * k * pitch * time + phase)
    wave += 0.05 * rng.random((count, 1)) * rng.normal(size=wave.shape)
    wave -= wave.mean(1, keepdims=True)
    return (wave / wave.std(1, keepdims=True)).astype(np.float32)


def patches(count: int, side: int, seed: int = 0, *, mirror: bool = False) -> npt.NDArray[np.uint8]:
    """Return square patches [N, side, side, 3] of three photographs, every third around a face."""
    rng = np.random.default_rng(seed)
    images = [_portrait(), *_sklearn_photographs()]
    result = []
    for i in range(count):
        if i % 3 == 0:
            image, size = images[0], int(_FACE_SIZE * rng.uniform(0.7, 1.25))
            corner = [int(c - size / 2 + 0.2 * size * rng.uniform(-1, 1)) for c in _FACE]
        else:
            image, size = images[rng.integers(len(images))], int(rng.integers(side, 300))
            corner = [int(rng.integers(0, length - size)) for length in (image.height, image.width)]
        box = (corner[1], corner[0], corner[1] + size, corner[0] + size)
        pixels = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box=box))
        result.append(pixels[:, ::-1] if mirror else pixels)
    return np.stack(result)


def photographs(count: int, side: int, seed: int = 0, *, mirror: bool = False) -> npt.NDArray[np.uint8]:
    """Return square crops [N, side, side, 3] of 40 to 100 % of eleven photographs."""
    rng = np.random.default_rng(seed)
    images = all_photographs()
    result = []
    for i in range(count):
        image = images[i % len(images)]
        size = int(min(image.size) * rng.uniform(0.4, 1))
        x, y = (int(rng.integers(0, length - size + 1)) for length in image.size)
        pixels = np.asarray(
            image.resize((side, side), Image.Resampling.BILINEAR, box=(x, y, x + size, y + size))
        )
        result.append(pixels[:, ::-1] if mirror else pixels)
    return np.stack(result)


@functools.cache
def all_photographs() -> tuple[Image.Image, ...]:
    """Return the photographs in RGB; those of scikit-image only if it is installed."""
    images = [_portrait(), *_sklearn_photographs()]
    spec = importlib.util.find_spec("skimage")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "data"
        images += [
            Image.open(folder / name).convert("RGB") for name in _PHOTOGRAPHS if (folder / name).exists()
        ]
    return tuple(images)


def _portrait() -> Image.Image:
    with Image.open(_matplotlib_data() / "sample_data" / "grace_hopper.jpg") as portrait:
        return portrait.convert("RGB")


def _sklearn_photographs() -> list[Image.Image]:
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(image) for image in load_sample_images().images]


def _matplotlib_data() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path())


@functools.cache
def _words(evaluation: bool) -> tuple[str, ...]:
    """Return words of the one or the other half of a text."""
    words = re.findall(r"[A-Za-z][A-Za-z,.;:]*", " ".join(topics.topics.values()))
    return tuple(words[len(words) // 2 :] if evaluation else words[: len(words) // 2])


def _phrase(rng: np.random.Generator, length: int, evaluation: bool) -> str:
    """Return consecutive words of about ``length`` characters, some in capitals, some numbers."""
    words, at, phrase = _words(evaluation), int(rng.integers(len(_words(evaluation)) - length)), ""
    while len(phrase) < length:
        chance = rng.random()
        number = f"{rng.integers(10_000)}" if chance < 0.5 else f"{rng.integers(1000) / 100:.2f}"
        word = number if rng.random() < 0.15 else words[at]
        phrase += ("" if not phrase else " ") + (word.upper() if rng.random() < 0.1 else word)
        at += 1
    return phrase


@functools.cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(_matplotlib_data() / "fonts" / "ttf" / f"{name}.ttf"), size)


def _line(rng: np.random.Generator, height: int, width: int, evaluation: bool) -> Image.Image:
    """Return an image of one line of text that is at most ``width`` wide, padded with grey."""
    font = _font(_FONTS[rng.integers(len(_FONTS))], int(height * rng.uniform(0.5, 0.72)))
    text = _phrase(rng, int(rng.integers(6, 24)), evaluation)
    paper, ink = rng.integers(170, 256, 3), rng.integers(0, 90, 3)
    if rng.random() < 0.25:
        paper, ink = ink, paper
    length = min(int(font.getlength(text)) + int(rng.integers(4, 20)), width)
    image = Image.new("RGB", (length, height), tuple(map(int, paper)))
    ImageDraw.Draw(image).text(
        (int(rng.integers(2, 8)), height // 2 + int(rng.integers(-3, 4))),
        text,
        tuple(map(int, ink)),
        font,
        "lm",
    )
    image = image.rotate(rng.uniform(-1.5, 1.5), Image.Resampling.BILINEAR, fillcolor=tuple(map(int, paper)))
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.9)))


def text_lines(
    count: int, height: int, width: int, seed: int = 0, *, evaluation: bool = False, turned: bool = False
) -> Pixels:
    """Return lines of text [N, 3, height, width] from -1 to 1, padded with 0 on the right.

    Args:
        count: number of lines.
        height: of an image.
        width: of an image.
        seed: of the words and their look.
        evaluation: use the second half of the text.
        turned: turn every other line upside down.

    Returns:
        The lines.
    """
    rng = np.random.default_rng(seed)
    result = np.zeros((count, 3, height, width), np.float32)
    for i in range(count):
        image = _line(rng, height, width, evaluation)
        if turned and i % 2:
            image = image.rotate(180)
        pixels = np.asarray(image, np.float32) + rng.normal(0, rng.uniform(0, 8), (height, image.width, 3))
        result[i, :, :, : image.width] = (np.clip(pixels, 0, 255).transpose(2, 0, 1) / 255 - 0.5) / 0.5
    return result


def pages(
    count: int, side: int, seed: int = 0, *, evaluation: bool = False, turned: bool = False
) -> npt.NDArray[np.uint8]:
    """Return square images [N, side, side, 3] with text: on paper, every third on a photograph.

    Args:
        count: number of pages.
        side: of an image.
        seed: of the words and their look.
        evaluation: use the second half of the text.
        turned: turn the pages by 0, 90, 180 and 270 degrees in turn.

    Returns:
        The pages.
    """
    rng = np.random.default_rng(seed)
    backgrounds = photographs(count, side, seed, mirror=evaluation)
    result = []
    for i in range(count):
        on_photograph = i % 3 == 2
        paper, ink = rng.integers(190, 256, 3), rng.integers(0, 80, 3)
        image = Image.new("RGB", (side, side), tuple(map(int, paper)))
        if on_photograph:
            image = Image.blend(Image.fromarray(backgrounds[i]), image, rng.uniform(0, 0.5))
        _write(image, rng, tuple(map(int, ink)), sparse=on_photograph, evaluation=evaluation)
        angle = (90 * (i % 4) if turned else 0) + rng.uniform(-2, 2)
        image = image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=tuple(map(int, paper)))
        pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.8))), np.float32)
        noise = rng.normal(0, rng.uniform(0, 6), pixels.shape)
        result.append(np.clip(pixels + noise, 0, 255).astype(np.uint8))
    return np.stack(result)


def _write(
    image: Image.Image, rng: np.random.Generator, ink: tuple[int, ...], *, sparse: bool, evaluation: bool
) -> None:
    """Write lines of text from the top to the bottom of a page."""
    draw, y, side = ImageDraw.Draw(image), int(rng.integers(4, 20)), image.width
    font = _FONTS[rng.integers(len(_FONTS))]
    size = int(side * rng.uniform(0.035, 0.09))
    while y < side - size:
        text = _phrase(rng, int(rng.integers(8, 60)), evaluation)
        draw.text((int(rng.integers(4, side // 4)), y), text, ink, _font(font, size))
        y += int(size * (rng.uniform(2, 5) if sparse else rng.uniform(1.2, 1.8)))
        if rng.random() < 0.2:
            size = int(side * rng.uniform(0.035, 0.09))


def imagenet(pixels: npt.NDArray[np.uint8]) -> Pixels:
    """Return images [N, 3, H, W] normalised with ImageNet's mean and deviation from pixels [N, H, W, 3]."""
    mean, deviation = _IMAGENET
    return ((pixels.astype(np.float32) / 255 - mean) / deviation).transpose(0, 3, 1, 2).copy()


def unit(pixels: npt.NDArray[np.uint8]) -> Pixels:
    """Return images [N, 3, H, W] from 0 to 1 from pixels [N, H, W, 3]."""
    return (pixels.astype(np.float32) / 255).transpose(0, 3, 1, 2).copy()


def centred(pixels: npt.NDArray[np.uint8]) -> Pixels:
    """Return images [N, H, W, 3] from -1 to 1 from pixels [N, H, W, 3]."""
    return (pixels.astype(np.float32) - 127.5) / 128


def caffe(pixels: npt.NDArray[np.uint8]) -> Pixels:
    """Return BGR images [N, H, W, 3] without their means from RGB pixels [N, H, W, 3]."""
    return pixels[..., ::-1].astype(np.float32) - np.float32([104, 117, 123])


def speech(count: int, length: int, seed: int = 0) -> Pixels:
    """Return signals [N, length] at 16 kHz, voices of three formants in syllables, with noise.

    Pitch, vowels, pauses, level, noise (5 to 50 dB below the voice, white or low-pass), clipping and echo
    vary.
    """
    from scipy.signal import lfilter

    rng = np.random.default_rng(seed)
    result = np.empty((count, length), np.float32)
    for i in range(count):
        voice = np.zeros(length)
        base, at = rng.uniform(85, 250), int(rng.integers(0, _RATE // 2))
        while at < length:
            duration = int(_RATE * rng.uniform(0.08, 0.35))
            stop = min(at + duration, length)
            voice[at:stop] += _syllable(rng, base, duration)[: stop - at]
            at = stop + int(_RATE * (rng.uniform(0.2, 0.8) if rng.random() < 0.2 else rng.uniform(0, 0.08)))
        if rng.random() < 0.3:
            echo = np.exp(-np.arange(4000) / rng.uniform(300, 1500)) * rng.normal(size=4000) * 0.1
            echo[0] = 1
            voice = np.convolve(voice, echo)[:length]
        voice /= np.abs(voice).max() + 1e-9
        noise = rng.normal(size=length)
        if rng.random() < 0.5:
            noise = lfilter([0.1], [1, -0.9], noise)
        noise *= np.sqrt(np.mean(voice**2) / np.mean(noise**2)) * 10 ** (-rng.uniform(5, 50) / 20)
        wave = (voice + noise) * rng.uniform(0.1, 0.9)
        limit = rng.uniform(0.05, 0.3) if rng.random() < 0.15 else 1.0
        result[i] = np.clip(wave, -limit, limit)
    return result


def _syllable(rng: np.random.Generator, base: float, length: int) -> npt.NDArray[np.float64]:
    """Return one syllable: a pulse train or noise through the resonances of a vowel, with an envelope."""
    from scipy.signal import lfilter

    pitch = base * 2 ** np.linspace(rng.uniform(-0.25, 0.25), rng.uniform(-0.25, 0.25), length)
    phase = np.cumsum(pitch / _RATE)
    source = np.diff(np.floor(phase), prepend=0) + 0.02 * rng.normal(size=length)
    if rng.random() < 0.2:
        source = 0.3 * rng.normal(size=length)
    wave = source
    for formant in _VOWELS[rng.integers(len(_VOWELS))]:
        frequency = 2 * np.pi * formant * rng.uniform(0.9, 1.15) / _RATE
        radius = np.exp(-np.pi * rng.uniform(60, 150) / _RATE)
        wave = lfilter([1 - radius], [1, -2 * radius * np.cos(frequency), radius**2], wave)
    envelope = np.minimum(1, np.minimum(np.arange(length), np.arange(length)[::-1]) / (0.02 * _RATE))
    return wave * envelope * rng.uniform(0.4, 1) / (np.abs(wave).max() + 1e-9)


def log_mel(waves: Pixels, bands: int = 120, size: int = 321, hop: int = 160) -> Pixels:
    """Return log mel spectra [N, frames, bands] of signals at 16 kHz: (decibels to the loudest + 40)/40."""
    padded = np.pad(waves, ((0, 0), (size // 2, size // 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, size, axis=1)[:, ::hop]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    filters = _mel_filters(bands, size)
    result = []
    for one in windows:
        power = np.abs(np.fft.rfft(one * window, axis=1)) ** 2 @ filters.T
        decibels = 10 * np.log10(np.maximum(power, 1e-10) / max(power.max(), 1e-10))
        result.append((np.maximum(decibels, -80) + 40) / 40)
    return np.stack(result).astype(np.float32)


def _mel_filters(bands: int, size: int) -> npt.NDArray[np.float64]:
    """Return triangular filters [bands, size//2 + 1] on Slaney's scale, of area 1."""
    step = np.log(6.4) / 27
    top = 15 + np.log(_RATE / 2 / 1000) / step
    mels = np.linspace(0, top, bands + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    frequencies = np.arange(size // 2 + 1) * _RATE / size
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])[:, None]
