"""An agent that plays through an OpenAI client: two attempts at a question, the second after a hint.

Use: --agent_func_path examples/python/openai_agent_func.py --label_key <column with the answer>

Give prompts as plain text (without --apply_chat_template): the server renders the messages with the model's template.
"""

from openai import AsyncOpenAI

from openrlhf.utils.agent import OpenAIAgentExecutor


class AgentExecutor(OpenAIAgentExecutor):
    """What --agent_func_path looks for."""

    async def run(self, base_url, prompt, label):
        """Plays one episode and returns its reward."""
        messages = [{"role": "user", "content": prompt}]
        attempts, right = 0, False
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            while not right and attempts < 2:
                attempts += 1
                reply = await client.chat.completions.create(model="policy", messages=messages)
                answer = reply.choices[0].message.content
                right = str(label) in answer
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": "That is wrong. Try again."})
        reward = 1.0 / attempts if right else 0.0
        return {"reward": reward, "scores": float(right), "extra_logs": {"attempts": attempts}}
