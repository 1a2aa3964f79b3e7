"""`wb`: thin commands over the public functions. Every command that answers a question takes `--json`.

To add a command, write a function that takes the parsed arguments and returns an exit code (None: 0), and add its lines
to `parser`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from workbench.errors import BadInput, StageInterrupted, WorkbenchError
from workbench.launch.options import Parser
from workbench.support.files import path_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done; 1 the command failed or its answer is no; 2 wrong usage; 130 interrupted."""
    arguments = parser().parse_args(argv)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code or 0
    except WorkbenchError as error:
        print(f"wb: {error}", file=sys.stderr)
        return 130 if isinstance(error, StageInterrupted) else 1
    except BrokenPipeError:  # the reader has closed the pipe, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of `wb`: its commands, their arguments and the function that runs each command."""
    top = Parser(prog="wb", description="An interactive RLHF research workbench.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, text: str, *, answers: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        if answers:
            sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    doctor = add("doctor", _doctor, "what is installed, what can run here, and the remedy for what is missing")
    doctor.add_argument("--deep", action="store_true", help="import each engine as well: ten to thirty seconds")
    add("ls", _ls, "list the workbenches that run on this machine")
    stop = add("stop", _stop, "end a workbench and its hosts", answers=False)
    stop.add_argument("name", metavar="NAME")
    trace = add("trace", _trace, "write a run as a Chrome trace, for Perfetto", answers=False)
    trace.add_argument("run", metavar="NAME_OR_RUN_FOLDER", help="a running workbench, or the folder of any run")
    trace.add_argument("-o", "--output", metavar="FILE", default="trace.json", help="default: trace.json")
    reshard = add("reshard", _reshard, "count the bytes that move between a training and a generation layout")
    reshard.add_argument("--train", metavar="P-T-D", required=True, help="pipeline, tensor and data parallel sizes")
    reshard.add_argument("--generate", metavar="PG-TG", required=True, help="pipeline and tensor parallel sizes")
    reshard.add_argument("--strategy", default="hybridflow", help="hybridflow (default), v or full")
    reshard.add_argument(
        "--model", metavar="NAME_OR_CONFIG", required=True, help="a size, model, folder or config file"
    )
    reshard.add_argument("--dtype", help="dtype of the weights; default: the config's, else float32")
    mapping = add("map", _map, "search for the best placement on a cluster; no process is started")
    mapping.add_argument("--algorithm", default="ppo", help="ppo (default), grpo, remax or safe-rlhf")
    models = "comma-separated; a size (llama-7b, 13b, 34b, 70b), a model's name, its folder or a config file"
    mapping.add_argument("--models", metavar="ROLE=MODEL", required=True, help=models)
    mapping.add_argument("--gpus", metavar="N", type=int, required=True, help="devices of the cluster")
    mapping.add_argument("--hardware", default="a100-80g", help="a100-80g (default), h100, h200 or 'this machine'")
    mapping.add_argument("--prompt", metavar="TOKENS", type=int, default=1024, help="of a prompt; default: 1024")
    mapping.add_argument(
        "--response", metavar="TOKENS", default="1024", help="of a response, or a comma-separated sample; default: 1024"
    )
    mapping.add_argument("--batch", metavar="ROWS", type=int, default=1024, help="per iteration; default: 1024")
    mapping.add_argument("--dtype", default="bfloat16", help="dtype of products: bfloat16 (default) or float32")
    mapping.add_argument("--updates", metavar="N", type=int, default=8, help="optimizer steps per epoch; default: 8")
    placements = ("auto", "colocate", "split", "standalone")
    mapping.add_argument("--placement", choices=placements, default="auto", help="default: auto, which tries all")
    mapping.add_argument("--dependencies", action="store_true", help="also count waiting for calls of the same stage")
    mapping.add_argument("--granularity", metavar="N", type=int, help="allocate devices in multiples of N")
    mapping.add_argument("--top", metavar="N", type=int, default=5, help="number of plans to show; default: 5")
    evaluate = add("evaluate", _evaluate, "evaluate a checkpoint's policy on data: mean reward, pass@k, lengths")
    serve = add("serve", _serve, "serve a checkpoint's policy on the loopback by OpenAI's API, until Ctrl-C")
    trust = add("trust", _trust, "sign a checkpoint of another user or machine: its code may run", answers=False)
    for sub in (evaluate, serve, trust):
        sub.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder of a checkpoint, or a run folder")
    evaluate.add_argument("data", metavar="DATA", nargs="*", help="names, files or hub ids; default: its own prompts")
    evaluate.add_argument("--n", metavar="N", type=int, help="only the first N prompts of each; default: all")
    evaluate.add_argument("--samples", metavar="N", type=int, default=4, help="responses per prompt; default: 4")
    evaluate.add_argument("--seed", metavar="N", type=int, default=0, help="seed of sampling; default: 0")
    evaluate.add_argument("--reward", metavar="VERIFIER", help="a name in wb.verifiers; default: the checkpoint's")
    evaluate.add_argument("--threshold", type=float, default=1.0, help="the least reward that passes; default: 1")
    evaluate.add_argument("--output", metavar="FOLDER", help="keep the run folder here; default: it is deleted")
    evaluate.add_argument("--rows", metavar="FILE", help="also write a row per response to this .jsonl file")
    for sub, most in ((evaluate, 64), (serve, 256)):
        sub.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0: greedy; default: 1")
        sub.add_argument("--top-p", type=float, default=1.0, help="top-p of sampling; default: 1")
        sub.add_argument("--max-new-tokens", metavar="N", type=int, default=most, help=f"at most; default: {most}")
        sub.add_argument("--backend", choices=("inline", "ray"), default="inline", help="default: inline")
    export = add("export", _export, "write a notebook as a script; --check proves that they agree")
    export.add_argument("notebook", metavar="NOTEBOOK")
    export.add_argument("-o", "--output", metavar="SCRIPT", help="default: the notebook's name, .py, in this folder")
    order = export.add_mutually_exclusive_group()
    order.add_argument("--as-written", dest="order", action="store_const", const="written", help="page order (default)")
    order.add_argument("--as-run", dest="order", action="store_const", const="run", help="order of the run")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    export.add_argument("--parameters", metavar="NAME", **several, default=[], help="more names that become options")
    export.add_argument("--loops", action="store_true", help="write repeated lines as a loop")
    export.add_argument("--moves", choices=("opening", "steps"), default="opening", help="see docs/export.md")
    export.add_argument("--run", metavar="FOLDER", **several, help="run folders with the record; default: searched")
    export.add_argument("--check", action="store_true", help="run notebook and script, and compare every metric")
    export.add_argument("--set", metavar="NAME=VALUE", **several, default=[], help="for --check: values of parameters")
    export.add_argument("--backend", choices=("ray", "inline"), help="for --check: backend of both")
    return top


def _doctor(arguments: argparse.Namespace) -> int:
    from workbench.launch import doctor

    report = doctor.examine(deep=arguments.deep)
    print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2) if arguments.json else report)
    return 0 if report.ok else 1


def _ls(arguments: argparse.Namespace) -> None:
    from workbench.launch.listing import ls

    rows = ls()
    text = _table([_short(row) for row in rows]) if rows else "no workbench runs on this machine"
    print(json.dumps(rows, indent=2, default=str) if arguments.json else text)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Shorten a row of `wb.ls` to the width of a terminal."""
    idle_s, driver = row["idle_s"], row["driver"]
    return {
        "name": row["name"],
        "alive": row["alive"],
        "holds": ", ".join(f"{role}: {model}" for role, model in row["roles"].items()) or "unknown here",
        "memory": "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.1f} GiB",
        "iteration": row["iteration"],
        "idle": "" if idle_s is None else f"{idle_s / 60:.0f} min",
        "driven by": "" if driver is None else f"process {driver['process']}" + ("" if driver["alive"] else " (ended)"),
        "processes": ", ".join(f"{p['host']}: {p['process']}" for p in row["processes"]),
    }


def _stop(arguments: argparse.Namespace) -> None:
    from workbench.launch import opening

    opening.stop(arguments.name)
    print(f"stopped {arguments.name}")


def _trace(arguments: argparse.Namespace) -> None:
    from workbench.backends import registry
    from workbench.telemetry.store import TelemetryStore

    living = [record.run_folder for record in registry.records() if record.name == arguments.run]
    folder = path_of(living[0] if living else arguments.run, "NAME_OR_RUN_FOLDER")
    if not folder.is_dir() or TelemetryStore(folder).spans().empty:
        raise BadInput(
            f"{folder} has no spans",
            "a run folder has them in spans.jsonl after the first stage",
            "give the name of a running workbench (`wb ls`), or the folder of a run: runs/NAME/DATE",
        )
    print(TelemetryStore(folder).chrome_trace(arguments.output))


def _reshard(arguments: argparse.Namespace) -> None:
    from workbench.resharding.strategies import report

    found = report(arguments.model, arguments.train, arguments.generate, arguments.strategy, arguments.dtype)
    if arguments.json:
        print(json.dumps(found))
        return
    groups = found["groups"]
    print(f"model {found['model_bytes']:,} bytes, {found['sharded_bytes']:,} of them sharded over a replica's ranks")
    print(f"generation tensor groups {groups['generation_tensor']}")
    print(f"micro data-parallel groups {groups['micro_data']}")
    print(_table([{key: f"{value:,}" for key, value in row.items()} for row in found["per_rank"]]))


def _map(arguments: argparse.Namespace) -> None:
    from workbench.mapping import Workload, search

    models: dict[str, str] = {}
    for part in arguments.models.split(","):
        role, equals, model = part.partition("=")
        if not (role and equals and model) or role in models:
            raise BadInput(f"--models {arguments.models}", f"{part!r} must be ROLE=MODEL, each role once",
                           "write --models actor=llama-7b,critic=llama-7b")  # fmt: skip
        models[role] = model
    workload = Workload(algorithm=arguments.algorithm, prompt_tokens=arguments.prompt, rows=arguments.batch,
                        response_tokens=_lengths(arguments.response), updates=arguments.updates,
                        dtype=arguments.dtype)  # fmt: skip
    plans = search(models, devices=arguments.gpus, hardware=arguments.hardware, workload=workload,
                   placement=arguments.placement, granularity=arguments.granularity, top=arguments.top,
                   dependencies=arguments.dependencies)  # fmt: skip
    print(json.dumps(plans.to_dict(), indent=2) if arguments.json else plans)


def _lengths(text: str) -> int | tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        rule = "it must be a length in tokens, or several, separated by commas"
        raise BadInput(f"--response {text}", rule, "write --response 256,512,2048") from None
    return found if len(found) > 1 else found[0]


def _evaluate(arguments: argparse.Namespace) -> None:
    from workbench.launch.evaluating import evaluate_checkpoint
    from workbench.support.files import SHARED, write_bytes

    rows = None if arguments.rows is None else path_of(arguments.rows, "--rows")
    found = evaluate_checkpoint(
        arguments.checkpoint, arguments.data, n=arguments.n, samples=arguments.samples, sampling=_sampling(arguments),
        seed=arguments.seed, reward=arguments.reward, threshold=arguments.threshold, backend=arguments.backend,
        runs=arguments.output,
    )  # fmt: skip
    if rows is not None:
        write_bytes(rows, found.rows.to_json(orient="records", lines=True).encode(), mode=SHARED)
    answer = {"data": json.loads(found.to_json(orient="index")), "conditions": dict(found.conditions)}
    print(json.dumps(answer, indent=2, default=str) if arguments.json else found)


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_new_tokens")}


def _serve(arguments: argparse.Namespace) -> None:
    from workbench.launch.evaluating import serve_checkpoint

    def ready(endpoint: Any) -> None:
        address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        lines = [*(f"{name:<8} {value}" for name, value in address.items()), "Ctrl-C ends it"]
        print(json.dumps(address) if arguments.json else "\n".join(lines), flush=True)

    serve_checkpoint(arguments.checkpoint, sampling=_sampling(arguments), backend=arguments.backend, ready=ready)


def _export(arguments: argparse.Namespace) -> int:
    from workbench.export import export_notebook
    from workbench.export.cells import read_notebook

    if not arguments.check and (arguments.set or arguments.backend):
        option = "--set" if arguments.set else "--backend"
        raise BadInput(f"{option} without --check", f"{option} is only for --check", "add --check, or leave it out")
    if arguments.check and arguments.order == "run":
        rule = "--check runs the notebook in the order of the page"
        raise BadInput("--as-run --check", rule, "leave out --check; or put the cells in order, and leave out --as-run")
    notebook = path_of(arguments.notebook, "NOTEBOOK")
    output = path_of(arguments.output or f"{notebook.stem}.py", "-o")
    if arguments.output is None and output.exists():
        raise BadInput(f"{output} exists", "only a file that -o names is overwritten", f"write -o {output}")
    page = read_notebook(notebook)
    if arguments.check:
        from workbench.export.proof import prove, settings_of  # pandas

        given = settings_of(arguments.set)
    script = export_notebook(
        notebook, output, order=arguments.order or "written", parameters=arguments.parameters,
        loops=arguments.loops, moves=arguments.moves, runs=arguments.run,
    )  # fmt: skip
    answer: dict[str, Any] = {"script": str(output), "parameters": script.parameters, "told": script.told}
    for line in script.told if not arguments.json else ():
        print(f"note: {line}", file=sys.stderr)
    if not arguments.check:
        print(json.dumps(answer) if arguments.json else output)
        return 0
    unknown = sorted(set(given) - set(script.parameters))
    if unknown:
        rule = f"the script's parameters are {', '.join(script.parameters) or 'none'}"
        raise BadInput(f"--set {unknown[0]}", rule, "use one of them; tag a parameter's cell `parameters`")
    forced = {"backend": arguments.backend} if arguments.backend else {}
    proof = prove(notebook, script.text, {**page.small_settings(), **given}, forced)
    answer |= {"equal": proof.ok, "tolerance": proof.tolerance, "calls": proof.table.to_dict("records")}
    print(json.dumps(answer) if arguments.json else f"{output}\n{proof}")
    return 0 if proof.ok else 1


def _trust(arguments: argparse.Namespace) -> None:
    from workbench.errors.plain_text import plain_text
    from workbench.session.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(arguments.checkpoint)
    print(plain_text(checkpoint.described(), 4000))
    checkpoint.trust()
    print("its files match its manifest; it is trusted now: wb.restore will run code that it holds")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as aligned text, with a column for each key, in the order in which keys first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([str(row.get(key, "")) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
