"""`shardwise launch`: run `shardwise train` on other machines by SLURM, Ray or ssh, or write a Kubernetes or SkyPilot manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.launchers import IMAGE, PORT
from shardwise.cli.output import CommandOutput, open_output, write_file
from shardwise.errors import UsageError

if TYPE_CHECKING:
    from shardwise.cli.launchers.job import LaunchJob


def launch(  # noqa: PLR0913
    command: Annotated[
        list[str], typer.Argument(metavar="-- train CONFIG.toml [KEY=VALUE]...", help="What is started.", show_default=False)
    ],
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script and give it to sbatch.")] = False,
    ray: Annotated[str, typer.Option("--ray", metavar="ADDRESS", help="On a Ray cluster: auto, local or HOST:PORT.")] = "",
    ssh: Annotated[str, typer.Option("--ssh", metavar="HOST,...", help="On these hosts, over ssh.")] = "",
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Write a Kubernetes job.")] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="Write a SkyPilot task.")] = False,
    hosts: Annotated[int, typer.Option("--hosts", min=0, help="Machines; by default as many as the plan's cluster has.")] = 0,
    ranks: Annotated[int, typer.Option("--ranks", min=0, help="Ranks on each; by default what the plan says.")] = 0,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Cores of a rank.")] = 1,
    option: Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Of sbatch: time=02:00:00.")] = None,
    image: Annotated[str, typer.Option("--image", help="For Kubernetes: the container's.")] = IMAGE,
    python: Annotated[str, typer.Option("--python", help="Python on those machines; by default this one's path.")] = "",
    host: Annotated[int, typer.Option("--host", hidden=True)] = -1,
    address: Annotated[str, typer.Option("--address", help="Where ranks meet; by default the first host.")] = "",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="And its port.")] = PORT,
    held: Annotated[bool, typer.Option("--held", hidden=True)] = False,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Start the same training elsewhere: SLURM, Ray, ssh, Kubernetes, SkyPilot.

    A plan for machines that are not there is refused before anything is started.

    \b
    Example:
      shardwise launch --ssh node1,node2 --ranks 8 -- train examples/gpt_text.toml
      shardwise launch --slurm --option time=02:00:00 -- train examples/gpt_text.toml plan.cluster=2xdgx-h100
      shardwise launch --ray auto --ranks 4 -- train examples/gpt_text.toml
      shardwise launch --kubernetes -o job.yaml -- train examples/gpt_text.toml plan.cluster=2xdgx-h100
    """
    with open_output(as_json) as out:
        from shardwise.cli.launchers.job import LaunchJob, parse_job  # here: the command starts fast

        if host >= 0:  # started on a host by one of the launchers below
            from shardwise.cli.launchers import host as on_host  # here: the command starts fast

            raise typer.Exit(on_host.run(LaunchJob(tuple(command), hosts, ranks, threads_per_rank=threads), host, address, port, held))
        if sum(map(bool, (slurm, ray, ssh, kubernetes, skypilot))) != 1:
            raise UsageError("say where: one of --slurm, --ray, --ssh, --kubernetes, --skypilot")
        names = [name.strip() for name in ssh.split(",")] if ssh else []
        job = parse_job(command, len(names) or hosts or (1 if ray else 0), ranks, threads, python)
        if slurm:
            _launch_slurm(job, option or [], target, out)
        elif kubernetes or skypilot:
            from shardwise.cli.launchers import manifests  # here: the command starts fast

            text = manifests.kubernetes_manifest(job, image) if kubernetes else manifests.skypilot_task(job)
            _write(text, job, target, out, is_secret=True)
        else:
            code = _run_job(job, names, ray, address, port)
            out.answer({**_job_record(job), "exit_code": code})
            raise typer.Exit(code)


def _run_job(job: LaunchJob, names: list[str], ray: str, address: str, port: int) -> int:
    if ray:
        from shardwise.cli.launchers import on_ray  # here: the command starts fast

        return on_ray.run(job, ray)
    from shardwise.cli.launchers import ssh  # here: the command starts fast

    return ssh.run(job, names, address, port)


def _launch_slurm(job: LaunchJob, sbatch_options: list[str], target: Path | None, out: CommandOutput) -> None:
    from shardwise.cli.launchers import slurm  # here: the command starts fast

    slurm.job_folder(job).mkdir(parents=True, exist_ok=True)  # SLURM does not create it
    if target is not None:
        _write(slurm.batch_script(job, sbatch_options), job, target, out)
        return
    file = slurm.job_folder(job) / "job.sh"
    number = slurm.submit_job(job, file, sbatch_options)
    out.message(f"job {number}: {job.num_hosts} hosts with {job.ranks_per_host} ranks each, {file}; `squeue -j {number}` shows it")
    out.answer({**_job_record(job), "file": str(file), "job": number})


def _job_record(job: LaunchJob) -> dict[str, object]:
    """Return the keys that every answer has, wherever the job is started."""
    return {"file": "", "ranks": job.num_ranks, "run_folder": job.run_folder}


def _write(text: str, job: LaunchJob, target: Path | None, out: CommandOutput, is_secret: bool = False) -> None:
    """Show a text, or write it to a file; a secret one then is nowhere else."""
    if target is None:
        out.text(text.rstrip("\n"))
    else:
        write_file(target, text, is_secret)
        out.message(f"written to {target}" + (", which only you may read: it has the run's token" if is_secret else ""))
    out.answer({**_job_record(job), "file": str(target or ""), "text": "" if is_secret and target is not None else text})
