// OpenAI's package for JavaScript: chats and responses.

import OpenAI from 'openai'
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod'
import * as z from 'zod'
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

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 })
const weather = {
  name: 'get_weather',
  description: 'Returns the weather.',
  parameters: z.toJSONSchema(Weather),
}
const hello = { role: 'user', content: HELLO }

async function chat(messages, fields = {}) {
  const answer = await client.chat.completions.create({
    model: MODEL,
    messages,
    max_tokens: 60,
    temperature: 0,
    ...fields,
  })
  return answer.choices[0].message
}

const chats = {
  first_chat: async () => (await chat([hello])).content,
  async stream() {
    const pieces = []
    const stream = client.chat.completions.stream({
      model: MODEL,
      messages: [hello],
      max_tokens: 60,
    })
    for await (const chunk of stream) pieces.push(chunk.choices[0]?.delta.content ?? '')
    return pieces
  },
  async tool_round_trip() {
    const tools = [{ type: 'function', function: weather }]
    const messages = [{ role: 'user', content: QUESTION }]
    messages.push(await chat(messages, { tools, tool_choice: 'required' }))
    for (const call of messages[1].tool_calls) {
      const content = getWeather(JSON.parse(call.function.arguments))
      messages.push({ role: 'tool', tool_call_id: call.id, content })
    }
    return (await chat(messages, { tools })).content
  },
  async *second_turn() {
    const messages = [{ role: 'system', content: MANUAL }, hello]
    messages.push(await chat(messages))
    yield
    await chat([...messages, { role: 'user', content: 'And then?' }])
  },
  async structured_output() {
    const answer = await client.chat.completions.parse({
      model: MODEL,
      messages: [hello],
      response_format: zodResponseFormat(Paint, 'paint'),
    })
    return answer.choices[0].message.parsed
  },
  overflow: () => chat([{ role: 'user', content: TOO_LONG }]),
}

const respond = (input, fields = {}) =>
  client.responses.create({
    model: MODEL,
    input,
    max_output_tokens: 60,
    temperature: 0,
    ...fields,
  })

const responses = {
  first_chat: async () => (await respond(HELLO)).output_text,
  async stream() {
    const pieces = []
    const stream = client.responses.stream({ model: MODEL, input: HELLO, max_output_tokens: 60 })
    for await (const event of stream) {
      if (event.type === 'response.output_text.delta') pieces.push(event.delta)
    }
    return pieces
  },
  async tool_round_trip() {
    const tools = [{ type: 'function', strict: true, ...weather }]
    const first = await respond(QUESTION, { tools, tool_choice: 'required' })
    const results = first.output
      .filter((item) => item.type === 'function_call')
      .map((item) => ({
        type: 'function_call_output',
        call_id: item.call_id,
        output: getWeather(JSON.parse(item.arguments)),
      }))
    return (await respond(results, { tools, previous_response_id: first.id })).output_text
  },
  async *second_turn() {
    const first = await respond(HELLO, { instructions: MANUAL })
    yield
    await respond('And then?', { instructions: MANUAL, previous_response_id: first.id })
  },
  async structured_output() {
    const answer = await client.responses.parse({
      model: MODEL,
      input: HELLO,
      text: { format: zodTextFormat(Paint, 'paint') },
    })
    return answer.output_parsed
  },
  overflow: () => respond(TOO_LONG),
}

await run('openai', { chat: chats, responses })
