"""The least that a Typer app with one Rich table can be: what start-up is compared with."""

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer()


@app.command()
def main() -> None:
    """Print a table of ten rows."""
    table = Table("row", "square")
    for row in range(10):
        table.add_row(str(row), str(row * row))
    Console().print(table)


if __name__ == "__main__":
    app()
