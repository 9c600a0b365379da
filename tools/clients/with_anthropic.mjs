// Anthropic's package for JavaScript.

import Anthropic from '@anthropic-ai/sdk'
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod'
import * as z from 'zod'
import {
  BASE_URL,
  HELLO,
  KEY,
  MANUAL,
  MODEL,
  Paint,
  QUESTION,
  TOO_LONG,
  Weather,
  getWeather,
  run,
} from './checks.mjs'

const client = new Anthropic({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 })
const weather = {
  name: 'get_weather',
  description: 'Returns the weather.',
  input_schema: z.toJSONSchema(Weather),
}
const hello = { role: 'user', content: HELLO }
const asked = { model: MODEL, max_tokens: 60, temperature: 0 }
const ask = (messages, fields = {}) => client.messages.create({ ...asked, messages, ...fields })

const messages = {
  first_chat: async () => (await ask([hello])).content[0].text,
  async stream() {
    const pieces = []
    const stream = client.messages.stream({ ...asked, messages: [hello] })
    stream.on('text', (text) => pieces.push(text))
    await stream.finalMessage()
    return pieces
  },
  async tool_round_trip() {
    const turns = [{ role: 'user', content: QUESTION }]
    const { content } = await ask(turns, { tools: [weather], tool_choice: { type: 'any' } })
    const results = content
      .filter((block) => block.type === 'tool_use')
      .map((block) => ({
        type: 'tool_result',
        tool_use_id: block.id,
        content: getWeather(block.input),
      }))
    turns.push({ role: 'assistant', content }, { role: 'user', content: results })
    return (await ask(turns, { tools: [weather] })).content[0].text
  },
  async *second_turn() {
    const { content } = await ask([hello], { system: MANUAL })
    yield
    const turns = [hello, { role: 'assistant', content }, { role: 'user', content: 'And then?' }]
    await ask(turns, { system: MANUAL })
  },
  async structured_output() {
    const answer = await client.messages.parse({
      ...asked,
      messages: [hello],
      output_config: { format: zodOutputFormat(Paint) },
    })
    return answer.parsed_output
  },
  overflow: () => ask([{ role: 'user', content: TOO_LONG }]),
}

await run('@anthropic-ai/sdk', { messages })
