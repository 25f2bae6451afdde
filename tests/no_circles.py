"""A contract of import-linter: no circle of imports among files, packages' `__init__` included.

Its own contract about circles compares siblings only, so it does not see a package whose modules
import it while it imports them.
"""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.application import contract_utils

# import-linter imports this file before it looks for the packages. The finder of an editable
# installation takes all of the checkout for parts of the package, `tests` and `runs`, too. Without
# that finder the packages are those in the folder where import-linter is started.
sys.meta_path[:] = [each for each in sys.meta_path if "ScikitBuild" not in type(each).__name__]


class NoCircles(Contract):
    """Kept if the files can be put in an order in which each imports only earlier ones."""

    type_name = "no_circles"

    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look for a circle; one is enough to report."""
        ignored: Any = self.ignore_imports
        # An exception that nothing needs any more is an error.
        contract_utils.remove_ignored_imports(graph, ignored, contract_utils.AlertLevel.ERROR)
        imports = {
            module: graph.find_modules_directly_imported_by(module) for module in graph.modules
        }
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            return ContractCheck(kept=False, metadata={"circle": error.args[1]})
        return ContractCheck(kept=True)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the circle."""
        # The sorter names each file before the one that imports it.
        output.print_error(" -> ".join(reversed(check.metadata["circle"])))
