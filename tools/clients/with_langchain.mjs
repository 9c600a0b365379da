// LangChain's chat model for JavaScript, over chats and responses.

import { HumanMessage, SystemMessage } from '@langchain/core/messages'
import { tool } from '@langchain/core/tools'
import { ChatOpenAI } from '@langchain/openai'
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

function checksOf(fields) {
  const model = new ChatOpenAI({
    model: MODEL,
    apiKey: KEY,
    configuration: { baseURL: V1 },
    maxTokens: 60,
    temperature: 0,
    maxRetries: 0,
    ...fields,
  })
  return {
    first_chat: async () => (await model.invoke(HELLO)).text,
    async stream() {
      const pieces = []
      for await (const chunk of await model.stream(HELLO)) pieces.push(chunk.text)
      return pieces
    },
    async tool_round_trip() {
      const weather = tool(getWeather, {
        name: 'get_weather',
        description: 'Returns the weather.',
        schema: Weather,
      })
      const messages = [new HumanMessage(QUESTION)]
      const required = model.bindTools([weather], { tool_choice: 'required' })
      messages.push(await required.invoke(messages))
      for (const call of messages[1].tool_calls) messages.push(await weather.invoke(call))
      return (await model.bindTools([weather]).invoke(messages)).text
    },
    async *second_turn() {
      const messages = [new SystemMessage(MANUAL), new HumanMessage(HELLO)]
      messages.push(await model.invoke(messages))
      yield
      await model.invoke([...messages, new HumanMessage('And then?')])
    },
    structured_output: () =>
      model.withStructuredOutput(Paint, { method: 'jsonSchema' }).invoke(HELLO),
    overflow: () => model.invoke(TOO_LONG),
  }
}

await run('@langchain/openai', { chat: checksOf({}), responses: checksOf({ useResponsesApi: true }) })
