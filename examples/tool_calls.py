"""Force a tool call: start a server, and send a request that requires a call of the tool."""

import subprocess
import sys
from pathlib import Path

from openai import OpenAI

TEMPLATE = Path(__file__).parent / "serve" / "hermes.jinja"
COMMAND = [sys.executable, "-m", "foredraft", "serve", "zoo:smollm2", "--port", "8765"]
COMMAND += ["--tool-call-parser", "hermes", "--chat-template", str(TEMPLATE)]

weather = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True) as server:
    try:
        assert server.stderr is not None
        next(line for line in server.stderr if "serving" in line)  # printed when the server is ready
        client = OpenAI(base_url="http://127.0.0.1:8765/v1", api_key="none")
        answer = client.chat.completions.create(
            model="zoo:smollm2",
            messages=[{"role": "user", "content": "How warm is it in Paris?"}],
            tools=[{"type": "function", "function": {"name": "weather", "parameters": weather}}],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=100,
        )
        for call in answer.choices[0].message.tool_calls or []:
            print(call.function.name, call.function.arguments)
    finally:
        server.terminate()
