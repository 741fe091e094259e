"""Parameters that any mesh exports, the safetensors library reads, and any other mesh imports, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import divided_model
import ml_dtypes
import numpy as np
import pytest
from stored_files import by_rank_0, only_file
from tiers import square_grid

from pdgemm.errors import ArgumentError, DTypeError, FileError
from pdgemm.io.safetensors import windows
from pdgemm.parallel import Buckets, Mesh, Part, export_parameters, import_parameters
from pdgemm.parallel.states import whole_parameters

safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
pytestmark = pytest.mark.mpi

MESHES = {
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}],
    4: [{"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"dp": 4, "ep": 4}, {"dp": 2, "pp": 2, "ep": 2}],
}


def meshes(comm: Any) -> Iterator[Any]:
    """Meshes of all these ranks, one after the other."""
    for sizes in MESHES[comm.size]:
        with Mesh(comm.Dup(), **sizes) as mesh:
            yield mesh


def values(dtype: Any) -> dict[str, np.ndarray]:
    """The whole parameters of the model."""
    return {name: divided_model.values(name).astype(dtype) for name in divided_model.divisions()}


def own_windows(mesh: Any, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = divided_model.names_of(mesh.shape, mesh.rank)
    return {name: whole[name][divided_model.window(mesh.shape, mesh.rank, name)] for name in names}


def same(buckets: Any, whole: dict[str, np.ndarray]) -> bool:
    """Are this rank's parts windows of these parameters, to the bit?"""
    own, expected = divided_model.own_values(buckets), own_windows(buckets.mesh, whole)
    assert own.keys() == expected.keys()
    return all(own[name].tobytes() == x.astype(own[name].dtype).tobytes() for name, x in expected.items())


def zeros(mesh: Any, **how: Any) -> Any:
    """The same model, of which all elements are 0."""
    shapes = divided_model.divisions()
    names = divided_model.names_of(mesh.shape, mesh.rank)
    return Buckets(mesh, {x: Part(np.zeros(shapes[x][0]), **shapes[x][1]) for x in names}, **how)


@square_grid
def test_any_mesh_writes_the_file_of_the_library_and_reads_it(comm: Any, shared_tmp_path: Path) -> None:
    """All stages, with and without master weights: the bytes of the file are the same; no elements are sent."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    def metadata() -> Any:
        with safe_open(ours, "numpy") as file:
            return file.metadata()

    ours, theirs = shared_tmp_path / "ours.safetensors", shared_tmp_path / "theirs.safetensors"
    for turn, mesh in enumerate(meshes(comm)):
        for dtype in (np.dtype("d"), np.dtype(ml_dtypes.bfloat16)):
            how: Any = {
                "stage": (turn + dtype.itemsize // 8) % 4,
                "dtype": dtype,
                "bucket_bytes": (200, 3000)[turn % 2],
            }
            how |= {"same_bits": turn % 3 == 2}
            whole = values(dtype)
            by_rank_0(comm, lambda whole=whole: save_file(whole, theirs, metadata={"written by": "pdgemm"}))
            buckets = Buckets(mesh, divided_model.parts(mesh), **how)
            mesh.traffic.clear()
            export_parameters(ours, buckets)
            assert by_rank_0(comm, metadata) == {"written by": "pdgemm", "format": "pt"}
            size = export_parameters(ours, buckets, metadata={})  # the library writes several items in any order
            expected = by_rank_0(comm, theirs.read_bytes)
            assert by_rank_0(comm, ours.read_bytes) == expected and size == len(expected)
            empty = zeros(mesh, **how)
            assert import_parameters(theirs, empty) == ((), ())
            assert sum(x.words_received for x in mesh.traffic.values()) == 0
            assert same(empty, whole)
    assert only_file(shared_tmp_path, comm) == ["ours.safetensors", "theirs.safetensors"]


@square_grid
def test_trained_on_2_x_2_and_imported_on_3(comm: Any, shared_tmp_path: Path) -> None:
    """After steps, from every stage to another one: what was updated, and its master weights, to the bit."""
    from safetensors.numpy import load_file

    some = comm.Split(int(comm.rank < 3), comm.rank)
    with Mesh(comm.Dup(), dp=2, tp=2) as mesh:
        for stage, dtype in ((0, "float16"), (1, "d"), (3, "bfloat16")):
            _, optimizer = divided_model.run(mesh, 2, stage=stage, dtype=dtype)
            plain, wide = shared_tmp_path / f"{stage}.safetensors", shared_tmp_path / f"{stage}-wide.safetensors"
            export_parameters(plain, optimizer.buckets)
            export_parameters(wide, optimizer.buckets, dtype="d" if dtype == "d" else "f", check=False)
            whole, masters = by_rank_0(comm, lambda plain=plain, wide=wide: (load_file(plain), load_file(wide)))
            assert same(optimizer.buckets, whole)
            assert all(np.array_equal(x, masters[name].astype(x.dtype)) for name, x in whole.items())
            narrow = dtype in ("float16", "bfloat16")
            assert any((masters[name] != x).any() for name, x in whole.items()) == narrow
            if comm.rank < 3:
                with Mesh(some.Dup(), **({"tp": 3} if stage % 2 else {"dp": 3})) as other:
                    for path, expected in ((plain, whole), (wide, masters)):
                        buckets = zeros(other, stage=(stage + 1) % 4, dtype=dtype)
                        import_parameters(path, buckets)
                        assert same(buckets, expected)
                        export_parameters(again := path.with_suffix(".again"), buckets, dtype=masters["table"].dtype)
                        assert other.comm.bcast(again.read_bytes() == wide.read_bytes() or path == plain)
            comm.Barrier()


@pytest.mark.on_ranks(2)
def test_names_and_transposed_matrices_of_other_programs(comm: Any, shared_tmp_path: Path) -> None:
    """A file as PyTorch's layers write it, divided by rows, by columns and by ZeRO, is read and written again."""
    from safetensors.numpy import load_file, save_file

    theirs, ours = shared_tmp_path / "theirs.safetensors", shared_tmp_path / "ours.safetensors"
    whole = values("f")
    turned = [name for name, x in whole.items() if x.ndim == 2 and "positions" not in name]
    foreign = {
        f"model.{name.replace('/', '.')}.weight": np.ascontiguousarray(x.T if name in turned else x)
        for name, x in whole.items()
    }
    by_rank_0(comm, lambda: save_file(foreign, theirs))
    for number, mesh in enumerate(meshes(comm)):
        buckets = zeros(mesh, stage=3 - number % 4, dtype="f")
        how: Any = {"names": lambda name: f"model.{name.replace('/', '.')}.weight", "transposed": turned}
        if number % 2:
            how = {"names": {name: how["names"](name) for name in whole}, "transposed": lambda name: name in turned}
        import_parameters(theirs, buckets, **how)
        assert same(buckets, whole)
        export_parameters(ours, buckets, **how)
        saved = by_rank_0(comm, lambda: load_file(ours))
        assert saved.keys() == foreign.keys()
        assert all(np.array_equal(saved[name], x) for name, x in foreign.items())


def test_types_of_files(comm: Any, shared_tmp_path: Path) -> None:
    """Master weights take what they hold to the bit; the rest is refused, or rounded where the caller says so."""
    from safetensors.numpy import save_file

    path = shared_tmp_path / "x.safetensors"
    x = np.linspace(-3, 3, 35).reshape(7, 5)
    with Mesh(comm.Dup(), dp=-1) as mesh:
        for stored, here, exact in (
            ("f", "d", True), ("float16", "bfloat16", True), ("bfloat16", "float16", True), ("bfloat16", "d", True),
            ("float8_e4m3fn", "f", True), ("float8_e5m2", "bfloat16", True), ("d", "f", False), ("int8", "f", False),
            ("int64", "d", False), ("bool", "f", False), ("uint8", "d", False),
        ):  # fmt: skip
            there = x.astype(stored)
            by_rank_0(comm, lambda there=there: save_file({"w": there}, path))
            buckets = Buckets(mesh, {"w": np.zeros((7, 5))}, dtype=here, stage=3)
            if not exact:
                with pytest.raises(FileError, match=r"w is 7 x 5 \w+ there, and 7 x 5 float\d\d here: see convert="):
                    import_parameters(path, buckets)
            import_parameters(path, buckets, convert=not exact)
            with buckets.forward():
                assert np.array_equal(buckets.parameters["w"], there.astype(buckets.layout.dtype))
            if exact:
                with pytest.raises(ArgumentError, match="was not written by pdgemm: it is replaced only with"):
                    export_parameters(path, buckets, dtype=stored)
                export_parameters(path, buckets, dtype=stored, overwrite=True)
                assert by_rank_0(comm, path.read_bytes)[-there.nbytes :] == there.tobytes()
        by_rank_0(comm, lambda: save_file({"w": x.astype("complex64")}, path))
        with pytest.raises(FileError, match="w is 7 x 5 complex64 there, which is not read, and 7 x 5 float64 here"):
            import_parameters(path, buckets, convert=True)


def test_a_foreign_file(comm: Any, shared_tmp_path: Path) -> None:
    """One error on all ranks, which lists names, shapes and types here and there; no parameter is changed."""
    from safetensors.numpy import save_file

    path = shared_tmp_path / "x.safetensors"
    there = {
        "w": np.ones((5, 4), "f"),
        "b": np.ones(4, "f"),
        "norm": np.ones((2, 4), "f"),
        "lm_head": np.ones((9, 4), "f"),
    }
    by_rank_0(comm, lambda: save_file(there, path))
    with Mesh(comm.Dup(), tp=-1) as mesh:
        model = {"w": Part(np.zeros((4, 5)), tp=1), "b": np.zeros(4), "norm": np.zeros(4), "table": np.zeros((9, 4))}
        buckets = Buckets(mesh, model, dtype="f")
        expected = (
            "x.safetensors has parameters of another model: w is 5 x 4 float32 there, and 4 x 5 float32 here: see "
            "transposed=; norm is 2 x 4 float32 there, and 4 float32 here; table is 9 x 4 float32 here, and not there; "
            "lm_head is 9 x 4 float32 there, and not here"
        )
        with pytest.raises(FileError) as error:
            import_parameters(path, buckets)
        assert str(error.value).endswith(expected), error.value
        assert len({*comm.allgather(str(error.value))}) == 1
        with pytest.raises(FileError, match=r"w \(there lm_head\) is 9 x 4 .* w is 5 x 4 float32 there, and not here"):
            import_parameters(path, buckets, names={"w": "lm_head"})
        with pytest.raises(FileError) as error:
            import_parameters(path, buckets, strict=False, transposed=["w"])
        assert str(error.value).endswith("model: norm is 2 x 4 float32 there, and 4 float32 here")
        assert not any(buckets.parameters[name].any() for name in model)

        fits = Buckets(mesh, {name: x for name, x in model.items() if name != "norm"}, dtype="f", stage=2)
        unmatched = import_parameters(path, fits, strict=False, transposed=["w"])
        assert unmatched == (("table",), ("lm_head", "norm")) and unmatched.extra == ("lm_head", "norm")
        assert fits.parameters["w"].all() and fits.parameters["b"].all() and not fits.parameters["table"].any()
        many = Buckets(mesh, {f"p{n}": np.zeros(3) for n in range(30)})
        with pytest.raises(FileError, match="p19 is 3 float64 here, and not there; and 14 more$"):
            import_parameters(path, many)
        for message, arguments in (
            ("names has 'v', which is no parameter; these are w, b", {"names": {"v": "w"}}),
            ("in the file is a string, got None", {"names": lambda name: None}),
            ("got 'w': pass \\['w'\\]", {"transposed": "w"}),
            ("transposed has 'v', which is no parameter", {"transposed": ["v"]}),
            ("'b' has the shape \\(4,\\): matrices alone are transposed", {"transposed": ["b"]}),
        ):
            with pytest.raises(ArgumentError, match=message):
                import_parameters(path, buckets, **arguments)  # type: ignore[arg-type]
        for damaged in (b"", by_rank_0(comm, path.read_bytes)[:-1], b"\x89HDF" * 9):
            by_rank_0(comm, lambda damaged=damaged: path.write_bytes(damaged))
            with pytest.raises(FileError, match="is not a safetensors file, or is damaged"):
                import_parameters(path, buckets)


def test_what_is_no_export(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error on all ranks; the old file stays, and nothing lies beside it."""
    path, last = shared_tmp_path / "x.safetensors", comm.size - 1
    with Mesh(comm.Dup(), dp=-1) as mesh:
        buckets = Buckets(mesh, {"w": np.arange(35.0).reshape(7, 5), "b": np.ones(5)}, stage=1)
        export_parameters(path, buckets)
        old = by_rank_0(comm, path.read_bytes)
        for error, message, arguments in (
            (DTypeError, "exported as real numbers of .*, got dtype=int32", {"dtype": "int32"}),
            (DTypeError, "exported as real numbers", {"dtype": "complex64"}),
            (ArgumentError, "names of their own, got w and b as 'x'", {"names": lambda name: "x"}),
            (ArgumentError, "names of their own, got w and b as 'b'", {"names": {"w": "b"}}),
            (ArgumentError, "no tensor has the name '__metadata__'", {"names": {"w": "__metadata__"}}),
            (ArgumentError, "are strings, got 3", {"metadata": {"step": 3}}),
        ):
            with pytest.raises(error, match=message):
                export_parameters(path, buckets, **arguments)  # type: ignore[arg-type]
        for call in (export_parameters, import_parameters):
            with pytest.raises(ArgumentError, match="different arguments"):
                call(path, buckets, names={"w": f"w{comm.rank == last}"})
            with pytest.raises(ArgumentError, match="different arguments"):
                call(path, buckets, transposed=["w"] * (comm.rank == last))

        def fails(*arguments: Any) -> None:
            windows.write_range(*arguments)
            if comm.rank == last:
                raise OSError("the disk is gone")

        def loses(transfer: Any, place: Any, start: int, written: np.ndarray) -> None:
            windows.write_range(transfer, place, start, written + (comm.rank == last))

        for wrong, error, message in ((fails, OSError, "is gone"), (loses, FileError, "does not hold the bytes")):
            with monkeypatch.context() as patch:
                patch.setattr(whole_parameters, "write_range", wrong)
                with pytest.raises(error, match=message):
                    export_parameters(path, buckets)
    assert by_rank_0(comm, path.read_bytes) == old
    assert only_file(shared_tmp_path, comm) == ["x.safetensors"]


def test_arrays_of_any_dimensions(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided along each dimension, a number, and nothing at all; large windows go in blocks, of any size."""
    from safetensors.numpy import load_file

    path = shared_tmp_path / "x.safetensors"
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        f"{len(shape)}-{tp}": (shape, tp)
        for shape in ((3,), (5, 7), (2, 3, 4), (2, 3, 2, 5))
        for tp in (None, *range(len(shape)))
    }
    shapes |= {"number": ((), None), "empty": ((0, 4), 0), "none": ((3, 0), None)}
    whole = {x: np.random.default_rng(n).random(shape) for n, (x, (shape, _)) in enumerate(shapes.items())}
    turned = [name for name, x in whole.items() if x.shape == (5, 7)]
    with Mesh(comm.Dup(), tp=comm.size) as mesh:
        for stage, elements, transposed in ((0, 1, []), (3, 5, turned), (3, 4, []), (3, windows.ELEMENTS, [])):
            monkeypatch.setattr(windows, "ELEMENTS", elements)
            buckets, other = (
                Buckets(mesh, {x: Part(factor * whole[x], tp=tp) for x, (_, tp) in shapes.items()}, stage=stage)
                for factor in (1, 0)
            )
            export_parameters(path, buckets, transposed=transposed)
            saved = by_rank_0(comm, lambda: load_file(path))
            assert saved.keys() == whole.keys()
            for name, x in whole.items():
                assert np.array_equal(saved[name].T if name in transposed else saved[name], x), name
            import_parameters(path, other, transposed=transposed)
            with buckets.forward(), other.forward():
                for name in whole:
                    assert buckets.parameters[name].tobytes() == other.parameters[name].tobytes(), name
