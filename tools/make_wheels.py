"""Builds wheels into dist/: kproxy's, and its compiled core's for x86-64 and arm64 (manylinux2014: glibc 2.17).

Run by `./dev wheels`, with maturin and zig, which links for both. A target's standard library comes with the compiler
that has it (`rustup target add`); else from Debian's Rust and the package of that architecture, which is unpacked in
.cache and not installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".cache/wheels"
TOOLS = WORK / "tools/bin"
PACKAGES = ("maturin==1.16.0", "ziglang==0.17.1")
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}  # by the target's architecture


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> None:
    subprocess.run(
        [str(part) for part in command], cwd=folder, env=os.environ | {"UV_SYSTEM_CERTS": "1"} | environment, check=True
    )


def has_library(target: str) -> bool:
    """Whether the compiler in PATH has the target's standard library."""
    asked = ["rustc", "--print", "target-libdir", "--target", target]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.returncode == 0 and any(Path(done.stdout.strip()).glob("libstd-*.rlib"))


def debian_rust(architecture: str, target: str) -> dict[str, str]:
    """The environment in which cargo builds for a target with Debian's Rust. Its cargo reads no index over HTTPS, so
    the crates are fetched by the one in PATH."""
    if not all(Path("/usr/bin", name).exists() for name in ("cargo", "rustc", "apt-get")):
        sys.exit(
            f"no Rust here has the library of {target}: `rustup target add {target}`, or Debian's packages cargo, rustc"
        )
    here = WORK / architecture
    lists = here / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-q", "-o", f"APT::Architectures::={DEBIAN[architecture]}", "-o", f"Dir::State::lists={lists}"]
    run("apt-get", *options, "update", folder=here)
    run("apt-get", *options, "download", f"libstd-rust-dev:{DEBIAN[architecture]}", folder=here)
    for package in here.glob("*.deb"):
        run("dpkg-deb", "-x", package, here / "root")
    libraries = here / "sysroot/lib/rustlib"
    libraries.mkdir(parents=True, exist_ok=True)
    for library in (*Path("/usr/lib/rustlib").glob("*-linux-gnu"), here / "root/usr/lib/rustlib" / target):
        (libraries / library.name).symlink_to(library)
    compiler = here / "rustc"
    compiler.write_text(f'#!/bin/sh\nexec /usr/bin/rustc --sysroot "{here / "sysroot"}" "$@"\n')
    compiler.chmod(0o755)
    crates = here / "crates"
    run("cargo", "vendor", "--quiet", crates, folder=here / "native")
    (here / "native/Cargo.lock").unlink()  # in a newer format
    (here / "native/.cargo").mkdir(exist_ok=True)
    (here / "native/.cargo/config.toml").write_text(
        f'[source.crates-io]\nreplace-with = "here"\n[source.here]\ndirectory = "{crates}"\n'
    )
    return {"PATH": f"{TOOLS}:/usr/bin:/bin", "RUSTC": str(compiler)}


def build_core(architecture: str) -> None:
    target = f"{architecture}-unknown-linux-gnu"
    here = WORK / architecture
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    shutil.copytree(ROOT / "native", here / "native")
    with_tools = {"PATH": f"{TOOLS}:{os.environ['PATH']}"}
    environment = with_tools if has_library(target) else debian_rust(architecture, target)
    options = ("--release", "--zig", "--compatibility", "manylinux2014", "--target", target, "--out", ROOT / "dist")
    folder = here / "native"
    run(TOOLS / "maturin", "build", *options, folder=folder, CARGO_TARGET_DIR=str(here / "target"), **environment)


def main(architectures: list[str]) -> None:
    if unknown := set(architectures) - set(DEBIAN):
        sys.exit(f"{', '.join(sorted(unknown))}: wheels are made for {' and '.join(DEBIAN)}")
    uv = (Path(sys.executable).with_name("uv"), "--no-config")
    run(*uv, "venv", "--quiet", "--clear", TOOLS.parent)
    run(*uv, "pip", "install", "--quiet", "--python", TOOLS / "python", *PACKAGES)
    run(*uv, "build", "--quiet", "--wheel", "--out-dir", ROOT / "dist", ROOT)
    for architecture in architectures or DEBIAN:
        build_core(architecture)
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        print(wheel.relative_to(ROOT))


main(sys.argv[1:])
