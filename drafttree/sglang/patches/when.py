"""When patches are applied, in the words of `Patch.when`."""

AT_REGISTRATION = "at registration; changes nothing for servers without a drafttree method"
AT_CHECK = "when a server with a method is checked, before it starts its processes"
WITH_A_WORKER = "when a method's worker is made, before the memory pools"
