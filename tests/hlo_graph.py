"""What a test asks an executable's HLO text: what waits for the host, and what depends on what."""

import re

INSTRUCTION = re.compile(r"^ *(?P<root>ROOT )?%?(?P<name>[\w.-]+) = .*? (?P<opcode>[a-z][a-z0-9-]*)\((?P<operands>[^)]*)\)")

HOST_OP = re.compile(r"\b(?:infeed|outfeed|send|recv)(?:-done)?\(|custom_call_target=\"[^\"]*callback[^\"]*\"")
"""An instruction that waits for the host."""


class HloGraph:
    """Of the entry computation. Nodes are instructions; a fusion or a call is one. An operand stands ahead of its users, as XLA
    prints it."""

    def __init__(self, text: str):
        entry = re.search(r"^ENTRY .*?^}", re.sub(r"/\*.*?\*/", "", text), re.M | re.S).group()
        self.operands, self.opcode, self.root = {}, {}, ""
        for line in entry.splitlines():
            if found := INSTRUCTION.match(line):
                name = found["name"]
                self.operands[name] = re.findall(r"[\w.-]+", found["operands"])
                self.opcode[name] = found["opcode"]
                self.root = name if found["root"] else self.root

    def parameter(self, argument: str) -> str:
        """The parameter that an argument of the jitted function became."""
        (found,) = [name for name, opcode in self.opcode.items() if opcode == "parameter" and name.startswith(f"{argument}.")]
        return found

    def behind(self, source: str) -> list[str]:
        """Everything that depends on a node, in order."""
        found = [source]
        for name, operands in self.operands.items():
            if not set(found).isdisjoint(operands):
                found.append(name)
        return found[1:]
