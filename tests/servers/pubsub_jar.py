"""The jar of Google's Pub/Sub emulator, from an installed Cloud SDK or from Google's Debian package.

`emulator()` looks for the SDK's first, and else fetches the package once into `$XDG_CACHE_HOME/anybroker` or
`~/.cache/anybroker`, without installing it. What fails says what to install.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.servers.kafka_jars import cache_root, find_java, locked
from tests.servers.running import run_to_end

__all__ = ["Emulator", "emulator"]

PACKAGE = "google-cloud-cli-pubsub-emulator"
FETCH_SECONDS = 600.0
_NEEDED = (
    "The tests against Pub/Sub need Google's emulator: add Google's apt repository, or run: gcloud components install "
    "pubsub-emulator"
)
_JARS = "platform/pubsub-emulator/lib/cloud-pubsub-emulator-*-all.jar"
_USUAL_PLACES = ("/usr/lib/google-cloud-sdk", "/usr/share/google-cloud-sdk", "/opt/google-cloud-sdk")


class Emulator(NamedTuple):
    """The requirements to run it."""

    java: str
    jar: Path

    def command(self, port: int) -> list[str]:
        return [
            self.java,
            "-Xmx256m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Djava.net.preferIPv4Stack=true",
            "-jar",
            str(self.jar),
            "--host=127.0.0.1",
            f"--port={port}",
        ]


@cache
def emulator() -> Emulator:
    """The emulator, downloaded if it is missing.

    :raises RuntimeError: Java is missing, or the package cannot be fetched.
    """
    return Emulator(find_java("Pub/Sub")[0], _installed() or _fetched())


def _installed() -> Path | None:
    gcloud = shutil.which("gcloud")
    roots = [Path(place) for place in _USUAL_PLACES]
    if gcloud is not None:
        roots.insert(0, Path(gcloud).resolve().parent.parent)
    return next((jar for root in roots for jar in sorted(root.glob(_JARS))), None)


def _fetched() -> Path:
    place = cache_root() / "pubsub-emulator"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock")):
            if not place.exists():
                _fetch(place)
    return next(place.glob("*.jar"))


def _fetch(place: Path) -> None:
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None:
        raise RuntimeError(
            "The tests against Pub/Sub need Google's emulator, and there is no apt to fetch it with; install it with: "
            "gcloud components install pubsub-emulator"
        )
    with tempfile.TemporaryDirectory(prefix=".pubsub-emulator.", dir=place.parent) as folder:
        run_to_end([apt, "download", PACKAGE], _NEEDED, seconds=FETCH_SECONDS, folder=Path(folder))
        package = next(Path(folder).glob("*.deb"))
        run_to_end([dpkg, "-x", str(package), "content"], _NEEDED, seconds=FETCH_SECONDS, folder=Path(folder))
        partial = Path(folder) / "jars"
        partial.mkdir()
        for jar in Path(folder).glob(f"content/usr/*/google-cloud-sdk/{_JARS}"):
            shutil.move(jar, partial / jar.name)
        if not any(partial.iterdir()):
            raise RuntimeError(f"The package {PACKAGE} holds no emulator's jar any more")
        partial.rename(place)
