"""What the gateway costs, and whether it stays as it is: each command measures processes from outside.

goodgate bench-gateway soak --minutes 30      # or python -m gateway.commands.bench soak ...
"""
