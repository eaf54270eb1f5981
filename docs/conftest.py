"""At the end of a run: the commands that it ran."""

from pages import ran


def pytest_terminal_summary(terminalreporter):
    if ran:
        terminalreporter.section("commands run, in seconds")
        for command in ran:
            terminalreporter.write_line(f"{command.seconds:6.1f}  {command.command}")
        total = sum(command.seconds for command in ran)
        terminalreporter.write_line(f"{total:6.1f}  in all, {len(ran)} commands, some of them at the same time")
