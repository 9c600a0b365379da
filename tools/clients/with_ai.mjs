// Vercel's AI SDK, by each of its providers that fits.

import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, generateText, isStepCount, streamText, tool } from 'ai'
import {
  HELLO,
  KEY,
  MANUAL,
  MODEL,
  Paint,
  QUESTION,
  TOO_LONG,
  V1,
  Weather,
  getWeather,
  run,
} from './checks.mjs'

function checksOf(model) {
  const asked = { model, maxOutputTokens: 60, temperature: 0, maxRetries: 0 }
  const ask = (fields) => generateText({ ...asked, ...fields })
  return {
    first_chat: async () => (await ask({ prompt: HELLO })).text,
    async stream() {
      const pieces = []
      for await (const text of streamText({ ...asked, prompt: HELLO }).textStream) pieces.push(text)
      return pieces
    },
    async tool_round_trip() {
      const get_weather = tool({
        description: 'Returns the weather.',
        inputSchema: Weather,
        execute: getWeather,
      })
      return (await ask({ prompt: QUESTION, tools: { get_weather }, stopWhen: isStepCount(3) })).text
    },
    async *second_turn() {
      const messages = [{ role: 'user', content: HELLO }]
      const first = await ask({ instructions: MANUAL, messages })
      yield
      messages.push(...first.response.messages, { role: 'user', content: 'And then?' })
      await ask({ instructions: MANUAL, messages })
    },
    async structured_output() {
      return (await ask({ prompt: HELLO, output: Output.object({ schema: Paint }) })).output
    },
    overflow: () => ask({ prompt: TOO_LONG }),
  }
}

const openai = createOpenAI({ baseURL: V1, apiKey: KEY })
const compatible = createOpenAICompatible({
  name: 'local',
  baseURL: V1,
  apiKey: KEY,
  supportsStructuredOutputs: true,
})
const anthropic = createAnthropic({ baseURL: V1, apiKey: KEY })

await run('ai', {
  '@ai-sdk/openai': checksOf(openai(MODEL)),
  '@ai-sdk/openai, chat': checksOf(openai.chat(MODEL)),
  '@ai-sdk/openai-compatible': checksOf(compatible(MODEL)),
  '@ai-sdk/anthropic': checksOf(anthropic(MODEL)),
})
