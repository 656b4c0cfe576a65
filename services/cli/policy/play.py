"""`rookery play`: whole episodes of a trained policy, one after the other, as an mp4, in a window, or as lines."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.envs.state import seed_generators
from common.errors import ConfigError, ResourceError
from common.policies.environment import PICTURES
from common.policies.trained import TrainedPolicy
from common.units import EnvSteps
from services.cli.policy.evaluate import environment_errors, environment_seed, episode_bar


def play(policy: TrainedPolicy, *, episodes: int, seed: int, greedy: bool, video: Path | None, window: bool) -> None:
    """Play `episodes`, and print return and length of each; stop when the window is closed.

    They begin as the first ones of the environments of `evaluate` with the same seed, where those are seeded one by one.
    """
    _keep_pygame_quiet(window=window)
    seed_generators(seed)
    with ExitStack() as stack:
        with environment_errors(policy.settings.env.name):
            env = stack.enter_context(closing(policy.make_env(render_mode=PICTURES if video or window else None)))
        fps = float(env.metadata["render_fps"])
        file = stack.enter_context(closing(VideoFile(video, fps=fps))) if video else None
        screen = stack.enter_context(closing(Window(policy.run_id, fps=fps))) if window else None
        shows = [show for show in (file, screen) if show]
        report = stack.enter_context(episode_bar("playing", episodes))
        first = environment_seed(seed)
        for number in range(episodes):
            total, length = _episode(policy, env, seed=first + number, greedy=greedy, shows=shows)
            if screen is not None and screen.closed:
                break
            print(f"episode {number + 1}: return {total:g}, {length:,} env steps")
            report(number + 1)
    if file is not None:
        print(f"wrote {file.path}: {file.pictures:,} pictures at {fps:g} Hz, {file.seconds:.1f} s")


def _episode(
    policy: TrainedPolicy, env: Any, *, seed: int, greedy: bool, shows: list[VideoFile | Window]
) -> tuple[float, EnvSteps]:
    """Play one episode, or until a window is closed; return its return and its length."""
    name = policy.settings.env.name
    with environment_errors(name):
        observation, _ = env.reset(seed=seed)
    policy.reset()
    total, length, ended = 0.0, 0, False
    while not ended and not any(isinstance(show, Window) and show.closed for show in shows):
        action = policy(observation, greedy=greedy)
        with environment_errors(name):
            observation, reward, terminated, truncated, _ = env.step(action)
        total, length, ended = total + reward, length + 1, terminated or truncated
        for picture in env.render() or ():  # with the first step also that of the reset
            for show in shows:
                show.add(picture)
    return total, length


def _keep_pygame_quiet(*, window: bool) -> None:
    """Let pygame, with which some environments draw, print no greeting and open no sound device; without `window` no display."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if not window:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


_LEAST_ROWS = 400  # of a video: smaller pictures are enlarged, so that players and the colours of H.264 do not blur them
_X264 = {"crf": "18", "preset": "veryfast"}  # a quality at which no difference to the original is seen


def require_display() -> None:
    """Raise `ConfigError` where no window can be opened."""
    _require_package("pygame", distribution="pygame-ce")
    driver = os.environ.get("SDL_VIDEODRIVER")
    if sys.platform == "linux" and not (driver or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise ConfigError(
            "no display for a window", found="neither DISPLAY nor WAYLAND_DISPLAY", wanted="a desktop", fix="use --video FILE.mp4"
        )


def require_writable(path: Path) -> None:
    """Raise `ConfigError` where `path` cannot become a video."""
    _require_package("av", distribution="av")
    found = ""
    if path.suffix != ".mp4":
        found = "another ending"
    elif path.is_dir():
        found = "a directory"
    elif not path.parent.is_dir():
        found = f"no directory {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        found = "no permission to write"
    if found:
        raise ConfigError(f"video {path} cannot be written", found=found, wanted="a writable FILE.mp4")


def _require_package(name: str, *, distribution: str) -> None:
    if importlib.util.find_spec(name) is None:  # as in the images of actor and learner
        raise ConfigError(
            "a package is not installed", found=f"no {name}", wanted=distribution, fix=f"pip install {distribution}"
        )


class VideoFile:
    """An mp4 file, H.264, that is opened with the first picture."""

    def __init__(self, path: Path, *, fps: float) -> None:
        self.path, self.pictures = path, 0
        self._fps = Fraction(fps).limit_denominator(1000)
        self._container: Any = None
        self._stream: Any = None

    def close(self) -> None:
        """Complete the file."""
        if self._container is not None:
            with self._failures():
                self._container.mux(self._stream.encode())
                self._container.close()

    @property
    def seconds(self) -> float:
        """Length of the video."""
        return float(self.pictures / self._fps)

    def add(self, picture: NDArray[np.uint8]) -> None:
        """Append a picture [H, W, 3], all of one size. Raises `ResourceError`."""
        import av  # noqa: PLC0415  part of the command line alone

        picture = _enlarged(picture)
        height, width = (size - size % 2 for size in picture.shape[:2])  # H.264 stores colours of two by two pixels
        with self._failures():
            if self._container is None:
                self._container = av.open(str(self.path), "w", options={"movflags": "faststart"})
                self._stream = self._container.add_stream("libx264", rate=self._fps, options=_X264)
                self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture[:height, :width]), format="rgb24")
            self._container.mux(self._stream.encode(frame))
        self.pictures += 1

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # FFmpeg's too
            raise ResourceError(
                f"video {self.path} cannot be written", found=error.strerror, wanted="room on the disk"
            ) from error


class Window:
    """A window on the desktop that shows pictures at their speed."""

    def __init__(self, title: str, *, fps: float) -> None:
        self.closed = False  # by the user
        self._title, self._fps = title, fps
        self._screen: Any = None
        self._clock: Any = None

    def close(self) -> None:
        """Close the window."""
        import pygame  # noqa: PLC0415  part of the command line alone

        pygame.display.quit()

    def add(self, picture: NDArray[np.uint8]) -> None:
        """Show a picture [H, W, 3] until the next one is due. Raises `ResourceError` where no window can be opened."""
        import pygame  # noqa: PLC0415  as above

        surface = pygame.surfarray.make_surface(_enlarged(picture).swapaxes(0, 1))
        if self._screen is None:
            try:
                pygame.display.init()
                self._screen = pygame.display.set_mode(surface.get_size(), pygame.RESIZABLE)
            except pygame.error as error:
                fix = "use --video FILE.mp4"
                raise ResourceError("no window can be opened", found=str(error), wanted="a desktop", fix=fix) from error
            pygame.display.set_caption(self._title)
            self._clock = pygame.time.Clock()
        self.closed |= any(event.type == pygame.QUIT for event in pygame.event.get())
        self._screen.blit(pygame.transform.scale(surface, self._screen.get_size()), (0, 0))
        pygame.display.flip()
        self._clock.tick(self._fps)


def _enlarged(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    times = -(-_LEAST_ROWS // picture.shape[0])
    return picture.repeat(times, axis=0).repeat(times, axis=1)
